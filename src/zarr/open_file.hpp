// Opens files with arrays: HDF5 files, and Zarr stores as if they were HDF5 files.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <filesystem>

namespace muster::detail::zarr {

/// True if there is a folder with metadata of Zarr, or a zip archive, at `path`.
MUSTER_INTERNAL_API bool is_store(const std::filesystem::path& path);

/// Opens an HDF5 file by hdf5::open_file(), or a Zarr store. A store becomes an HDF5 file in memory that describes it:
/// its groups, and its arrays with their types, attributes, chunks and names of dimensions. The chunks themselves are
/// hdf5::foreign_chunks(). An array that cannot be read is refused when it is opened. Takes HDF5's lock.
MUSTER_INTERNAL_API hdf5::Handle open_file(const std::filesystem::path& path);

/// The one file of the data that is opened beside open_file(), for fingerprints and for reads without HDF5: the
/// metadata file at the root of a folder, a zip archive, or the HDF5 file itself.
MUSTER_INTERNAL_API std::filesystem::path main_file(const std::filesystem::path& path);

}  // namespace muster::detail::zarr
