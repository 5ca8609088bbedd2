// HDF5 files and their contents. Links to other files and external storage are refused.
#pragma once

#include "base/export.hpp"
#include "hdf5/file_storage.hpp"
#include "hdf5/handle.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// A file and a group in it, parsed from "FILE.h5" or "FILE.h5:/group".
struct MUSTER_INTERNAL_API GroupPath {
  explicit GroupPath(const std::string& text);
  /// "FILE.h5:/group/NAME".
  std::string shown(const std::string& name) const;

  std::string path, group;
};

/// Opens a file for reading, with POSIX I/O and without a file lock. The Errors for a missing file, a file that is not
/// HDF5 and a truncated file differ.
MUSTER_INTERNAL_API Handle open_file(const std::filesystem::path& path);
/// Makes a new file in the format of HDF5 1.10; data of `alignment` bytes or more begin at multiples of it. The file
/// must not exist.
MUSTER_INTERNAL_API Handle create_file(const std::filesystem::path& path, std::uint64_t alignment = 4096);
/// Like create_file(path), but in a fresh `storage`, which the caller may read once the handle is closed.
Handle create_file(const std::shared_ptr<FileStorage>& storage, std::uint64_t alignment = 4096,
                   const std::string& shown = "an HDF5 file in memory");

/// Opens a group by its path inside the file. Refuses external links and soft links without a target.
MUSTER_INTERNAL_API Handle open_group(hid_t file, const std::string& name, const std::string& shown);
/// Opens a dataset by its path inside the file. Refuses external links, soft links without a target, external storage,
/// objects that are not a dataset, and virtual datasets that with_sources() refuses. `shown`: the name in errors.
MUSTER_INTERNAL_API Handle open_dataset(hid_t file, const std::string& name, const std::string& shown);
/// True if the entry `name` of the group is a column: a dataset that is neither a single value nor a dimension of
/// NetCDF without a variable. Refuses external links and soft links without a target.
MUSTER_INTERNAL_API bool is_column(hid_t group, const std::string& name, const std::string& shown);
/// The names of the columns of a group, sorted. Throws an Error if there are none. `place`: of the group, for errors.
MUSTER_INTERNAL_API std::vector<std::string> columns_of(hid_t group, const GroupPath& place);

/// Names of the links of a group, sorted.
MUSTER_INTERNAL_API std::vector<std::string> list(hid_t group);
/// Dimensions of a dataset; empty for a scalar. Throws an Error if one does not fit an int64. `shown`: the name in
/// errors.
MUSTER_INTERNAL_API std::vector<std::int64_t> shape(hid_t dataset, const std::string& shown = {});
/// The sizes of the chunks of a dataset of `rank` dimensions, in values, all at least 1. `creation`: its properties.
/// Throws an Error (ExitCode::data) if the file is damaged there.
MUSTER_INTERNAL_API std::vector<std::int64_t> chunk_shape(hid_t creation, std::size_t rank, const std::string& doing);

/// The value of chunks that were never written, as a value of `type`. Zero if the dataset has no fill value or is never
/// filled (H5D_FILL_TIME_NEVER). `creation`: the dataset's properties.
MUSTER_INTERNAL_API std::vector<std::byte> fill_value(hid_t creation, hid_t type, const std::string& doing);

/// The place of a contiguous dataset's values in its file, in bytes; none if nothing was ever written.
MUSTER_INTERNAL_API std::optional<std::uint64_t> contiguous_offset(hid_t dataset);

/// Selects `count` rows of a dataset's space, in addition to the rows selected before (H5S_SELECT_OR) or instead of
/// them (H5S_SELECT_SET).
MUSTER_INTERNAL_API void select_rows(hid_t space, H5S_seloper_t how, std::int64_t first, std::int64_t count,
                                     std::string_view doing, ExitCode code = ExitCode::data);

}  // namespace muster::detail::hdf5
