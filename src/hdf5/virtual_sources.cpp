#include "hdf5/virtual_sources.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

namespace muster::detail::hdf5 {
namespace {

/// A name that HDF5 gives in two calls, for its length and for its letters.
template <class Get>
std::string name_from(Get&& get, const std::string& doing) {
  std::string name(static_cast<std::size_t>(check(get(nullptr, 0), doing)), '\0');
  check(get(name.data(), name.size() + 1), doing);
  return name;
}

/// What the virtual dataset takes from one of its sources.
struct Mapping {
  std::string file, dataset;
  /// The index of the last value that is taken, along each dimension. Empty if HDF5 takes all of the source, or as many
  /// values as there are.
  std::vector<hsize_t> last;
  std::int64_t count = 0;  ///< how many values are taken, if HDF5 takes all of the source; otherwise 0
};

Mapping mapping(hid_t creation, std::size_t i, const std::string& doing) {
  Mapping mapping;
  mapping.file =
      name_from([&](char* name, std::size_t size) { return H5Pget_virtual_filename(creation, i, name, size); }, doing);
  mapping.dataset =
      name_from([&](char* name, std::size_t size) { return H5Pget_virtual_dsetname(creation, i, name, size); }, doing);
  const Handle space(check(H5Pget_virtual_srcspace(creation, i), doing), H5Sclose);
  if (H5Sget_select_type(space.get()) == H5S_SEL_ALL) {
    const Handle shown(check(H5Pget_virtual_vspace(creation, i), doing), H5Sclose);
    mapping.count = H5Sget_select_npoints(shown.get());
    return mapping;
  }
  const auto rank = static_cast<std::size_t>(check(H5Sget_simple_extent_ndims(space.get()), doing));
  std::vector<hsize_t> first(rank);
  mapping.last.resize(rank);
  if (H5Sget_select_bounds(space.get(), first.data(), mapping.last.data()) < 0) {  // the selection is unlimited
    last_error();
    mapping.last.clear();
  }
  return mapping;
}

constexpr const char* same_file = ".";

/// True if the folder has the files of all sources.
bool has_all(const std::filesystem::path& folder, const std::vector<Mapping>& sources) {
  return std::ranges::all_of(sources, [&](const Mapping& source) {
    std::error_code ignored;
    return source.file == same_file || std::filesystem::exists(folder / source.file, ignored);
  });
}

/// The folder of the sources, as with_sources() describes it.
std::filesystem::path folder_of(const std::vector<Mapping>& sources, const std::filesystem::path& own_path) {
  const auto folder = own_path.parent_path();
#if !H5_VERSION_GE(1, 10, 2)
  return folder;  // this HDF5 has no H5Pset_virtual_prefix()
#endif
  std::error_code error;
  const auto resolved = std::filesystem::canonical(own_path, error).parent_path();
  return !error && !has_all(folder, sources) && has_all(resolved, sources) ? resolved : folder;
}

/// Opens the same dataset again, so that HDF5 takes its sources from `folder`.
Handle opened_again(Handle dataset, const std::filesystem::path& folder, const std::string& doing) {
  const Handle file(check(H5Iget_file_id(dataset.get()), doing), H5Fclose);
  const auto name =
      name_from([&](char* text, std::size_t size) { return H5Iget_name(dataset.get(), text, size); }, doing);
  const auto access = make_properties(H5P_DATASET_ACCESS, doing);
#if H5_VERSION_GE(1, 10, 2)
  check(H5Pset_virtual_prefix(access.get(), folder.c_str()), doing);
#endif
  dataset = {};  // HDF5 keeps the first folder as long as the dataset is open
  return {check(H5Dopen2(file.get(), name.c_str(), access.get()), doing), H5Dclose};
}

void require(const Mapping& source, const std::filesystem::path& own_path, const std::filesystem::path& folder,
             hid_t own_file, const std::string& doing) {
  const auto refuse = [&](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::data, doing, "it is a virtual dataset, and " + fact, remedy);
  };
  if (source.file.find('%') != std::string::npos || source.dataset.find('%') != std::string::npos)
    refuse("its sources are named by a pattern, " + source.file + ":" + source.dataset,
           "Name those files as one dataset instead");
  if (source.file.find('/') != std::string::npos)
    refuse("its source " + source.file + " is not named as a file in its own folder",
           "Name those files as one dataset instead");
  const bool is_same_file = source.file == same_file;
  const auto path = is_same_file ? own_path : folder / source.file;
  const auto shown = path.string() + ":" + source.dataset;
  constexpr const char* make = "Make it, or make the virtual dataset again";
  if (std::error_code error; !is_same_file && !std::filesystem::exists(path, error) && !error)
    refuse("its source " + path.string() + " does not exist", make);
  const auto other = is_same_file ? Handle() : open_file(path);
  const auto file = is_same_file ? own_file : other.get();
  const Handle dataset(H5Oopen(file, source.dataset.c_str(), H5P_DEFAULT), H5Oclose);
  if (!dataset) last_error();
  if (!dataset || H5Iget_type(dataset.get()) != H5I_DATASET) refuse("its source " + shown + " does not exist", make);
  const auto creation = dataset_property(dataset.get(), H5Dget_create_plist, doing);
  if (H5Pget_layout(creation.get()) == H5D_VIRTUAL || H5Pget_external_count(creation.get()) > 0)
    refuse("the values of its source " + shown + " lie in other files", "Name those files as one dataset instead");
  const auto used = filters(creation.get(), doing);
  if (const auto* const missing = missing_filter(used))
    refuse("HDF5, which reads it, lacks the filter " + missing->text() + " of its source " + shown,
           "Name those files as one dataset instead");
  const auto sizes = shape(dataset.get(), shown);
  const auto need = [&](std::uint64_t needed, std::int64_t there, const std::string& where) {
    if (std::cmp_greater(needed, there))
      refuse(str("its source ", shown, " is too short: it has ", there, " values", where, ", ", needed, " are needed"),
             make);
  };
  std::int64_t there = 1;
  for (const auto size : sizes) there = checked_product(there, size, doing, "the shape of " + shown);
  if (source.count > 0) need(static_cast<std::uint64_t>(source.count), there, "");
  for (std::size_t d = 0; d < source.last.size() && d < sizes.size(); ++d)
    need(source.last[d] + 1, sizes[d], str(" along dimension ", d));
}

}  // namespace

Handle with_sources(Handle dataset, hid_t creation, const std::string& shown) {
  const Lock lock;
  const std::string doing = "opening " + shown;
  const std::filesystem::path path =
      name_from([&](char* name, std::size_t size) { return H5Fget_name(dataset.get(), name, size); }, doing);
  const Handle file(check(H5Iget_file_id(dataset.get()), doing), H5Fclose);
  std::size_t count = 0;
  check(H5Pget_virtual_count(creation, &count), doing);
  std::vector<Mapping> sources;
  for (std::size_t i = 0; i < count; ++i) sources.push_back(mapping(creation, i, doing));
  const auto folder = folder_of(sources, path);
  for (const auto& source : sources) require(source, path, folder, file.get(), doing);
  return folder == path.parent_path() ? std::move(dataset) : opened_again(std::move(dataset), folder, doing);
}

}  // namespace muster::detail::hdf5
