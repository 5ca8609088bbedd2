// The names of dimensions in copies of HDF5 files: dimension scales, as NetCDF-4 has them.
#pragma once

#include "hdf5/dimensions.hpp"
#include "hdf5/handle.hpp"

#include <string>
#include <vector>

namespace muster::detail::convert {

/// The dimensions of a column that is copied.
struct ColumnDimensions {
  std::string name;                 ///< of the column in the copy
  std::string path;                 ///< of the dataset in its file; empty if it must not be a scale in the copy
  std::vector<hdf5::Scale> scales;  ///< one for each dimension
  bool loses_names = false;         ///< true if a dimension has a scale in its file and none in the copy

  /// True if the column is the scale of its own first dimension: a coordinate.
  bool is_scale() const { return !scales.empty() && !path.empty() && scales.front().path == path; }
};

ColumnDimensions dimensions_of(hid_t dataset, const std::string& name, const std::string& shown);

/// For a copy with other samples than the file, or with another order of them. Forgets each scale that belongs both to
/// the first dimension of a column, which has changed, and to another dimension, which has not. A column that is such a
/// scale itself keeps it for its own first dimension.
void forget_ambiguous(std::vector<ColumnDimensions>& columns);

/// Attaches scales to the dimensions of the columns of a new file. A scale is a copied column that was the scale in its
/// own file, or is made for a dimension without a variable, as NetCDF does. If dimensions of one scale differ in size,
/// only those of one size keep it. A dimension whose name another column has gets no scale; a warning names it. If a
/// dimension of a column loses its scale, the column's first dimension gets none either. `writing`: what is being done,
/// for errors. Takes HDF5's lock.
void name_dimensions(hid_t file, std::vector<ColumnDimensions> columns, const std::string& writing);

}  // namespace muster::detail::convert
