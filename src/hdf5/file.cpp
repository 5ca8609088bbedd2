#include "hdf5/file.hpp"

#include "base/file.hpp"
#include "base/number.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/foreign_chunks.hpp"
#include "hdf5/read_driver.hpp"
#include "hdf5/virtual_sources.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

/// Access properties: no file locks (HDF5 before 1.10.7 keeps them, since it has no setting for them), and closing a
/// file also closes the objects in it that are still open.
Handle file_access(const std::string& doing, ExitCode code) {
  auto access = make_properties(H5P_FILE_ACCESS, doing, code);
#if H5_VERSION_GE(1, 10, 7)
  check(H5Pset_file_locking(access.get(), false, true), doing, code);
#endif
  check(H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG), doing, code);
  return access;
}

/// H5Fclose for a file that was written. A FileStorage reports only its first failure. If the flush here fails,
/// H5Fclose writes the rest of the cache to memory, and this function still returns the failure.
herr_t close_written(hid_t file) {
  if (H5Fflush(file, H5F_SCOPE_GLOBAL) >= 0) return H5Fclose(file);
  const hid_t reasons = H5Eget_current_stack();
  H5Fclose(file);
  H5Eset_current_stack(reasons);  // which also closes `reasons`
  return -1;
}

[[noreturn]] void refuse_to_open(const std::string& doing, int error) {
  const bool forbidden = error == EACCES || error == EPERM;
  const auto code = forbidden ? ExitCode::data : read_error_code(error);
  const std::string remedy = remedy_of(error);
  throw Error(code, doing, std::strerror(error),
              error == ENOENT           ? "Check the path; `muster convert` makes datasets"
              : forbidden               ? "Check the permissions"
              : !remedy.empty()         ? remedy
              : code == ExitCode::retry ? retry_reading
                                        : "Check the path");
}

/// Throws the Error for an object that HDF5 cannot open. `reason`: why, as HDF5 says.
[[noreturn]] void refuse_object(hid_t file, const std::string& name, const std::string& shown, const Reason& reason) {
  const std::string doing = "opening " + shown;
  if (reason.code == ExitCode::retry) throw Error(reason.code, doing, reason.text, retry_reading);
  // H5Lexists() wants all links before the last one to exist, so the path is followed link by link.
  for (auto end = name.find('/', 1);; end = name.find('/', end + 1)) {
    const auto part = name.substr(0, end);
    H5L_info_t link;
    if (H5Lexists(file, part.c_str(), H5P_DEFAULT) <= 0 || H5Lget_info(file, part.c_str(), &link, H5P_DEFAULT) < 0) {
      last_error();
      throw Error(ExitCode::data, doing, "the file has no dataset \"" + name + "\"",
                  "`muster inspect` lists what it holds");
    }
    if (link.type != H5L_TYPE_HARD && link.type != H5L_TYPE_SOFT)
      throw Error(ExitCode::data, doing, "it is a link to another file; such links are not followed",
                  "Copy the data into the file, or choose other columns");
    if (link.type == H5L_TYPE_SOFT && H5Oexists_by_name(file, part.c_str(), H5P_DEFAULT) == 0)
      throw Error(ExitCode::data, doing, "it is a link whose target does not exist",
                  "Remove it, or choose other columns");
    if (end == std::string::npos) break;
  }
  if (reason.text.find("version number") != std::string::npos)
    throw Error(ExitCode::data, doing, "a newer HDF5 than this one wrote it (" + reason.text + ")",
                "Write it again for older ones: in h5py with libver=('earliest', 'v110')");
  throw Error(ExitCode::data, doing, "HDF5 cannot open it: " + reason.text, "Make or copy the file again");
}

/// Opens an object by its path inside the file, whatever it is.
Handle open_object(hid_t file, const std::string& name, const std::string& shown) {
  const hid_t id = H5Oopen(file, name.c_str(), H5P_DEFAULT);
  if (id < 0) refuse_object(file, name, shown, last_reason());
  return {id, H5Oclose};
}

}  // namespace

GroupPath::GroupPath(const std::string& text) : path(text), group("/") {
  if (const auto colon = text.rfind(":/"); colon != std::string::npos) {
    path = text.substr(0, colon);
    group = text.substr(colon + 1);
  }
}

std::string GroupPath::shown(const std::string& name) const {
  return path + ":" + group + (group.ends_with('/') ? "" : "/") + name;
}

Handle open_file(const std::filesystem::path& path) {
  const Lock lock;
  const std::string doing = "opening " + path.string();
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) refuse_to_open(doing, errno);
  if (S_ISDIR(status.st_mode)) throw Error(ExitCode::data, doing, "it is a folder", "Name an HDF5 file");
  if (!S_ISREG(status.st_mode)) throw Error(ExitCode::data, doing, "it is no regular file", "Name an HDF5 file");
  // HDF5 reports a lack of permission like a failed read. access() would not do: it may allow what open() refuses.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) refuse_to_open(doing, errno);
  char begin[3] = "";
  const auto length = ::pread(descriptor, begin, sizeof begin, 0);
  ::close(descriptor);
  if (std::string_view(begin, length > 0 ? static_cast<std::size_t>(length) : 0) == "CDF")
    throw Error(ExitCode::data, doing, "it is in NetCDF's classic format", "`nccopy -k nc4 IN OUT` makes an HDF5 file");
  const htri_t is_hdf5 = H5Fis_hdf5(path.c_str());
  if (is_hdf5 < 0) check(is_hdf5, doing);
  if (is_hdf5 == 0)
    throw Error(ExitCode::data, doing, "it is not an HDF5 file",
                "`muster convert` makes one from idx, npy, npz or csv");
  const auto access = file_access(doing, ExitCode::data);
  set_read_driver(access.get());
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get());
  if (file < 0) {
    const auto reason = last_reason();
    if (reason.code == ExitCode::retry) throw Error(reason.code, doing, reason.text, retry_reading);
    const bool truncated = reason.text.find("truncated") != std::string::npos;
    throw Error(ExitCode::data, doing, truncated ? "the file is truncated" : reason.text, "Make or copy it again");
  }
  return {file, H5Fclose};
}

Handle create_file(const std::filesystem::path& path, std::uint64_t alignment) {
  return create_file(std::make_shared<FileStorage>(path), alignment, path.string());
}

Handle create_file(const std::shared_ptr<FileStorage>& storage, std::uint64_t alignment, const std::string& shown) {
  const Lock lock;
  const std::string doing = "creating " + shown;
  const auto access = file_access(doing, ExitCode::retry);
  check(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_LATEST), doing, ExitCode::retry);
  if (alignment > 1) check(H5Pset_alignment(access.get(), alignment, alignment), doing, ExitCode::retry);
  set_storage(access.get(), storage);
  const auto creation = make_properties(H5P_FILE_CREATE, doing, ExitCode::retry);
  check(H5Pset_obj_track_times(creation.get(), false), doing, ExitCode::retry);  // equal content gives equal bytes
  return {check(H5Fcreate(shown.c_str(), H5F_ACC_TRUNC, creation.get(), access.get()), doing, ExitCode::retry),
          close_written};
}

Handle open_group(hid_t file, const std::string& name, const std::string& shown) {
  const Lock lock;
  const hid_t group = H5Gopen2(file, name.c_str(), H5P_DEFAULT);
  if (group < 0) {
    last_error();
    throw Error(ExitCode::data, "opening " + shown, "the file has no group \"" + name + "\"",
                "`muster inspect` lists what it holds");
  }
  return {group, H5Gclose};
}

Handle open_dataset(hid_t file, const std::string& name, const std::string& shown) {
  const Lock lock;
  const std::string doing = "opening " + shown;
  auto dataset = open_object(file, name, shown);
  if (H5Iget_type(dataset.get()) != H5I_DATASET)
    throw Error(ExitCode::data, doing, "\"" + name + "\" is not a dataset",
                "`muster inspect` lists what the file holds");
  const auto creation = dataset_property(dataset.get(), H5Dget_create_plist, doing);
  if (H5Pget_external_count(creation.get()) > 0)
    throw Error(ExitCode::data, doing, "its values lie in other files (external storage)", "Copy them into the file");
  if (H5Pget_layout(creation.get()) == H5D_VIRTUAL) return with_sources(std::move(dataset), creation.get(), shown);
  // Throws an Error if the dataset's chunks lie outside of the HDF5 file and cannot be read.
  static_cast<void>(foreign_chunks(dataset.get()));
  return dataset;
}

bool is_column(hid_t group, const std::string& name, const std::string& shown) {
  const Lock lock;
  const auto object = open_object(group, name, shown);
  return H5Iget_type(object.get()) == H5I_DATASET && !shape(object.get(), shown).empty() &&
         !is_only_dimension(object.get(), shown);
}

std::vector<std::string> columns_of(hid_t group, const GroupPath& place) {
  const Lock lock;
  auto names = list(group);
  std::erase_if(names, [&](const auto& name) { return !is_column(group, name, place.shown(name)); });
  if (names.empty())
    throw Error(ExitCode::data, "opening " + place.path, "group \"" + place.group + "\" holds no datasets",
                "Name the group as FILE.h5:/group; `muster inspect` lists what the file holds");
  return names;
}

std::vector<std::string> list(hid_t group) {
  const Lock lock;
  std::vector<std::string> names;
  check(H5Literate(
            group, H5_INDEX_NAME, H5_ITER_INC, nullptr,
            [](hid_t, const char* name, const H5L_info_t*, void* out) -> herr_t {
              static_cast<std::vector<std::string>*>(out)->emplace_back(name);
              return 0;
            },
            &names),
        "listing a group");
  return names;
}

std::vector<std::int64_t> shape(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the shape of " + (shown.empty() ? "a dataset" : shown);
  const auto space = dataset_property(dataset, H5Dget_space, doing);
  const auto rank = check(H5Sget_simple_extent_ndims(space.get()), doing);
  std::vector<hsize_t> sizes(static_cast<std::size_t>(rank));
  check(H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr), doing);
  std::vector<std::int64_t> shape;
  for (const auto size : sizes) shape.push_back(checked_cast<std::int64_t>(size, doing, "a dimension"));
  return shape;
}

std::vector<std::int64_t> chunk_shape(hid_t creation, std::size_t rank, const std::string& doing) {
  const Lock lock;
  std::vector<hsize_t> sizes(rank);
  // HDF5 checks neither the number of dimensions nor the sizes, and a damaged file may hold any.
  const int stored_rank = check(H5Pget_chunk(creation, static_cast<int>(rank), sizes.data()), doing);
  if (std::cmp_not_equal(stored_rank, rank) || std::ranges::count(sizes, hsize_t{0}) > 0)
    throw Error(ExitCode::data, doing, "its chunks have not as many dimensions as its values",
                "The file is damaged; make or copy it again");
  std::vector<std::int64_t> shape;
  for (const auto size : sizes) shape.push_back(checked_cast<std::int64_t>(size, doing, "a dimension of its chunks"));
  return shape;
}

std::vector<std::byte> fill_value(hid_t creation, hid_t type, const std::string& doing) {
  std::vector<std::byte> value(H5Tget_size(type));
  H5D_fill_value_t status{};
  H5D_fill_time_t time{};
  check(H5Pfill_value_defined(creation, &status), doing);
  check(H5Pget_fill_time(creation, &time), doing);
  if (status != H5D_FILL_VALUE_UNDEFINED && time != H5D_FILL_TIME_NEVER)
    check(H5Pget_fill_value(creation, type, value.data()), doing);
  return value;
}

std::optional<std::uint64_t> contiguous_offset(hid_t dataset) {
  const Lock lock;
  // For values that were never written, H5Dget_offset() returns HADDR_UNDEF plus the size of the file's user block.
  if (H5Dget_storage_size(dataset) == 0) return {};
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset != HADDR_UNDEF) return offset;
  last_error();
  return {};
}

void select_rows(hid_t space, H5S_seloper_t how, std::int64_t first, std::int64_t count, std::string_view doing,
                 ExitCode code) {
  std::vector<hsize_t> sizes(static_cast<std::size_t>(check(H5Sget_simple_extent_ndims(space), doing, code)));
  check(H5Sget_simple_extent_dims(space, sizes.data(), nullptr), doing, code);
  std::vector<hsize_t> start(sizes.size(), 0);
  start.front() = static_cast<hsize_t>(first);
  sizes.front() = static_cast<hsize_t>(count);
  check(H5Sselect_hyperslab(space, how, start.data(), nullptr, sizes.data(), nullptr), doing, code);
}

}  // namespace muster::detail::hdf5
