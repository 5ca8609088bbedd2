#include "zarr/open_file.hpp"

#include "base/file.hpp"
#include "base/text.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/file.hpp"
#include "hdf5/file_storage.hpp"
#include "hdf5/foreign_chunks.hpp"
#include "hdf5/types.hpp"
#include "zarr/chunks.hpp"
#include "zarr/metadata.hpp"
#include "zarr/store_files.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::zarr {
namespace {

constexpr std::ptrdiff_t most_levels = 64;  ///< of groups in groups

/// By the path of an array in the HDF5 file: a function that returns its chunks, or throws why they cannot be read.
using Arrays = std::map<std::string, std::function<std::shared_ptr<const hdf5::ForeignChunks>()>>;

/// Writes the HDF5 file that describes a store.
class Description {
 public:
  explicit Description(const std::filesystem::path& path)
      : path_(path.string()), doing_("opening " + path_), files_(std::make_shared<const StoreFiles>(path)) {}

  hdf5::Handle write() {
    const auto path = std::filesystem::absolute(path_).lexically_normal();  // which may end with a slash
    const auto root = read_node(*files_, "", doing_);
    if (!root)
      throw Error(ExitCode::data, doing_, "it holds no Zarr store: there is no zarr.json, .zgroup or .zarray",
                  "Name a store, with its metadata at the top of the folder or the archive");
    const auto storage = std::make_shared<hdf5::FileStorage>();
    storage->foreign = [arrays = arrays_](const std::string& at) {
      const auto found = arrays->find(at);
      return found == arrays->end() ? nullptr : found->second();
    };
    auto file = hdf5::create_file(storage, 1, "a description of " + path_);
    if (root->is_array)
      add_array(file.get(), "", (path.has_filename() ? path : path.parent_path()).stem().string(), *root);
    else
      add_members(file.get(), "");
    return file;
  }

 private:
  std::int64_t check(std::int64_t status) const { return hdf5::check(status, doing_, ExitCode::retry); }

  /// Adds the nodes in `folder`, which is empty or ends with a slash, to the group.
  void add_members(hid_t group, const std::string& folder) {
    for (const auto& name : files_->list(folder)) {
      const auto inside = folder + name + "/";
      try {
        if (std::ranges::count(inside, '/') > most_levels)
          throw Error(ExitCode::data, "reading " + path_ + ":/" + folder + name,
                      str("it lies more than ", most_levels, " levels deep"), "Name an inner group as the store");
        const auto node = read_node(*files_, inside, "reading " + path_ + ":/" + folder + name);
        if (!node) continue;
        if (node->is_array) {
          add_array(group, inside, name, *node);
        } else {
          const hdf5::Handle made(check(H5Gcreate2(group, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)),
                                  H5Gclose);
          add_members(made.get(), inside);
        }
      } catch (const Error& error) {
        refuse(group, "/" + folder + name, name, error);
      }
    }
  }

  /// Adds a dataset that stands for an array that cannot be read.
  void refuse(hid_t group, const std::string& path, const std::string& name, const Error& error) {
    if (check(H5Lexists(group, name.c_str(), H5P_DEFAULT)) == 0) {
      const auto space = hdf5::make_space({1}, doing_);
      const hdf5::Handle dataset(
          check(H5Dcreate2(group, name.c_str(), H5T_NATIVE_UINT8, space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)),
          H5Dclose);
    }
    arrays_->emplace(path, [error]() -> std::shared_ptr<const hdf5::ForeignChunks> { throw Error(error); });
  }

  void add_array(hid_t group, const std::string& folder, const std::string& name, const Node& node) {
    // An array at the root has no name in the store.
    const auto path = "/" + (folder.empty() ? name : folder.substr(0, folder.size() - 1));
    const auto shown = path_ + ":" + path;
    ArrayMetadata metadata(node, "reading " + shown);
    const auto dataset = make_dataset(group, name, metadata, "reading " + shown);
    // The attributes by which HDF5 and NetCDF name dimensions mean nothing in a store.
    for (const auto* name_in_hdf5 : {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid",
                                     "_Netcdf4Coordinates", hdf5::array_dimensions})
      metadata.attributes.erase(name_in_hdf5);
    write_attributes(dataset.get(), metadata, "reading " + shown);
    metadata.attributes.clear();
    if (!metadata.shape.empty())
      arrays_->emplace(path,
                       [chunks = chunks_of(files_, folder, std::move(metadata), shown, node.text)] { return chunks; });
  }

  hdf5::Handle make_dataset(hid_t group, const std::string& name, const ArrayMetadata& metadata,
                            const std::string& doing) const {
    const std::vector<hsize_t> shape(metadata.shape.begin(), metadata.shape.end()),
        chunk(metadata.chunk.begin(), metadata.chunk.end()), most(shape.size(), H5S_UNLIMITED);
    const auto creation = hdf5::make_properties(H5P_DATASET_CREATE, doing_);
    auto space = hdf5::make_space({}, doing_);
    if (!shape.empty()) {
      auto bytes = metadata.type.bytes();
      constexpr std::size_t most_bytes = std::numeric_limits<std::uint32_t>::max();
      for (const auto size : chunk) bytes *= size;
      if (bytes > most_bytes)
        throw Error(ExitCode::data, doing, str("a chunk has ", bytes, " bytes; the most are 4 GB"),
                    "Write it with smaller chunks, or in shards");
      check(H5Pset_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data()));
      space = {check(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), most.data())), H5Sclose};
    }
    const auto type = hdf5::memory_type_of(metadata.type.scalar);
    return {check(H5Dcreate2(group, name.c_str(), type.get(), space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT)),
            H5Dclose};
  }

  void write_attributes(hid_t dataset, const ArrayMetadata& metadata, const std::string& doing) const {
    for (const auto& [name, value] : metadata.attributes.items()) {
      if (name == "_FillValue")  // which NetCDF wants to have the type of the values
        write_values(dataset, name, hdf5::memory_type_of(metadata.type.scalar).get(), {},
                     value_bytes(metadata.type, value, doing).data());
      else
        write_attribute(dataset, name, value);
    }
    if (metadata.dimensions.empty()) return;
    write_attribute(dataset, hdf5::array_dimensions, Json(metadata.dimensions));
    const auto name = hdf5::Scale{hdf5::path_of(dataset)}.name();
    if (metadata.dimensions != std::vector{name}) return;
    write_attribute(dataset, "CLASS", "DIMENSION_SCALE");
    write_attribute(dataset, "NAME", name);
  }

  void write_values(hid_t dataset, const std::string& name, hid_t type, const std::vector<std::int64_t>& shape,
                    const void* values) const {
    const auto space = hdf5::make_space(shape, doing_);
    const hdf5::Handle made(check(H5Acreate2(dataset, name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT)),
                            H5Aclose);
    check(H5Awrite(made.get(), type, values));
  }

  /// Writes an attribute that is a number, a text, or a list of numbers or texts. Leaves out others.
  void write_attribute(hid_t dataset, const std::string& name, const Json& value) const {
    constexpr std::size_t most_values = 3'500, longest_name = 255;  // HDF5 keeps larger ones in another way
    const Json list = value.is_array() ? value : Json::array({value});
    const auto are = [&](auto kind) {
      return std::ranges::all_of(list, [&](const Json& each) { return (each.*kind)(); });
    };
    if (list.empty() || list.size() > most_values || name.empty() || name.size() > longest_name ||
        name.find('\0') != name.npos || check(H5Aexists(dataset, name.c_str())) > 0)
      return;
    std::vector<std::int64_t> shape;
    if (value.is_array()) shape.push_back(std::ssize(list));
    const auto write = [&](hid_t type, const void* values) { write_values(dataset, name, type, shape, values); };
    if (are(&Json::is_string)) {
      std::vector<const char*> texts;
      for (const auto& text : list) texts.push_back(text.get_ref<const std::string&>().c_str());
      const hdf5::Handle type(check(H5Tcopy(H5T_C_S1)), H5Tclose);
      check(H5Tset_size(type.get(), H5T_VARIABLE));
      check(H5Tset_cset(type.get(), H5T_CSET_UTF8));
      write(type.get(), texts.data());
    } else if (std::ranges::all_of(list, [](const Json& each) {
                 return each.is_number_integer() &&
                        (!each.is_number_unsigned() || std::in_range<std::int64_t>(each.get<std::uint64_t>()));
               })) {
      write(H5T_NATIVE_INT64, list.get<std::vector<std::int64_t>>().data());
    } else if (are(&Json::is_number)) {
      write(H5T_NATIVE_DOUBLE, list.get<std::vector<double>>().data());
    }
  }

  const std::string path_, doing_;
  const std::shared_ptr<const StoreFiles> files_;
  const std::shared_ptr<Arrays> arrays_ = std::make_shared<Arrays>();
};

/// False also for a file that cannot be read: hdf5::open_file() then says why.
bool is_zip(const std::filesystem::path& path) try {
  std::error_code none;
  std::string begin(4, '\0');
  if (!std::filesystem::is_regular_file(path, none)) return false;
  File(path, File::Mode::read).read_at(std::as_writable_bytes(std::span(begin)), 0);
  return begin == "PK\3\4";
} catch (const Error&) {
  return false;
}

}  // namespace

bool is_store(const std::filesystem::path& path) { return main_file(path) != path || is_zip(path); }

hdf5::Handle open_file(const std::filesystem::path& path) {
  const hdf5::Lock lock;
  if (main_file(path) == path) try {
      return hdf5::open_file(path);
    } catch (const Error&) {
      if (!is_zip(path)) throw;
    }
  return Description(path).write();
}

std::filesystem::path main_file(const std::filesystem::path& path) {
  std::error_code none;
  if (std::filesystem::is_directory(path, none))
    for (const auto* name : {"zarr.json", ".zgroup", ".zarray"})
      if (std::filesystem::exists(path / name, none)) return path / name;
  return path;
}

}  // namespace muster::detail::zarr
