// The dimensions of NetCDF's variables.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// A dimension scale: the dataset that stands for a dimension, in its file (HDF5 Dimension Scale Specification).
struct Scale {
  std::string path = {};                    ///< empty if the dimension has no scale
  std::optional<std::int32_t> number = {};  ///< NetCDF's number of the dimension, attribute _Netcdf4Dimid

  /// The name of the dimension, which is the last part of the path.
  std::string name() const { return path.substr(path.rfind('/') + 1); }
};

/// How the attribute NAME of a scale begins if NetCDF has no variable with the name of the dimension. A full stop and
/// the size follow.
inline constexpr const char* only_dimension = "This is a netCDF dimension but not a netCDF variable";

/// The attribute in which xarray stores the names of a Zarr array's dimensions. An empty name means that the dimension
/// has none.
inline constexpr const char* array_dimensions = "_ARRAY_DIMENSIONS";

/// An object's path in its file; empty if it has none.
MUSTER_INTERNAL_API std::string path_of(hid_t object);

/// The scale of each of the dataset's `rank` dimensions, the first if there are several: from the attribute
/// DIMENSION_LIST, as NetCDF-4 and h5py write it. A dataset that is a scale itself does not have it: with one dimension
/// it is its own scale; with several, NetCDF's numbers of them are read (attribute _Netcdf4Coordinates). Otherwise the
/// names in `array_dimensions` are taken as scales in the dataset's group.
MUSTER_INTERNAL_API std::vector<Scale> scales_of(hid_t dataset, std::size_t rank, const std::string& shown);
/// The names of the scales that scales_of() finds; empty for a dimension without one.
std::vector<std::string> dimension_names(hid_t dataset, std::size_t rank, const std::string& shown);

/// True if the dataset only stands for a dimension of NetCDF that has no variable of its name: it holds no values.
bool is_only_dimension(hid_t dataset, const std::string& shown);

}  // namespace muster::detail::hdf5
