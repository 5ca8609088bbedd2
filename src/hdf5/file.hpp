// HDF5 files, and what is in them: nothing that a file holds leads outside of it.
#pragma once

#include "hdf5/handle.hpp"
#include "hdf5/medium.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// What "FILE.h5" or "FILE.h5:/group" names.
struct Place {
  explicit Place(const std::string& text);
  /// "FILE.h5:/group/NAME".
  std::string shown(const std::string& name) const;

  std::string path, group;
};

/// Opens for reading, with POSIX I/O and no lock. Tells a missing file, one that is not HDF5 and a truncated one apart.
Handle open_file(const std::filesystem::path& path);
/// Makes a new file in the latest format, early allocation and data aligned to `alignment` bytes; it must not exist.
Handle create_file(const std::filesystem::path& path, std::uint64_t alignment = 4096);
/// The same on a fresh medium, which the caller may read once the handle is closed.
Handle create_file(const std::shared_ptr<Medium>& medium, std::uint64_t alignment = 4096,
                   const std::string& shown = "an HDF5 file in memory");

/// Opens a group or a dataset by its path inside the file. Refuses soft links that lead nowhere and external ones.
Handle open_group(hid_t file, const std::string& name, const std::string& shown);
/// Refuses external storage, virtual datasets, and what is not a dataset. `shown` names it in errors.
Handle open_dataset(hid_t file, const std::string& name, const std::string& shown);

/// Names of the links of a group, in the order of names.
std::vector<std::string> list(hid_t group);
/// Dimensions of a dataset; empty for a scalar. An Error for one that no int64 holds. `shown` names it in errors.
std::vector<std::int64_t> shape(hid_t dataset, const std::string& shown = {});

/// Selects `count` rows of a dataset's space: beside those that were (H5S_SELECT_OR), or in their place (…_SET).
void select_rows(hid_t space, H5S_seloper_t how, std::int64_t first, std::int64_t count, std::string_view doing,
                 ExitCode code = ExitCode::data);

/// One stage of the pipeline that chunks go through.
struct Filter {
  H5Z_filter_t id;
  std::string name;  ///< may be empty
  unsigned level;    ///< of deflate
};
/// Those in a dataset's creation properties.
std::vector<Filter> filters(hid_t creation, std::string_view doing);

}  // namespace muster::detail::hdf5
