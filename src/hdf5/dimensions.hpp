// The dimensions of NetCDF's variables.
#pragma once

#include "hdf5/handle.hpp"

#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// A name for each of the dataset's `rank` dimensions: that of the dimension scale attached to it (HDF5 Dimension Scale
/// Specification, attribute DIMENSION_LIST), as NetCDF-4 and h5py write them. Empty if a dimension has none.
std::vector<std::string> dimension_names(hid_t dataset, std::size_t rank, const std::string& shown);

/// True if the dataset only stands for a dimension of NetCDF that has no variable of its name: it holds no values.
bool is_only_dimension(hid_t dataset, const std::string& shown);

}  // namespace muster::detail::hdf5
