// NetCDF's attributes of packed values.
#pragma once

#include "hdf5/handle.hpp"

#include <optional>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// A stored value v stands for v × scale + offset, or for NaN if it is one of `missing`: attributes scale_factor,
/// add_offset, _FillValue and missing_value of the CF conventions, sections 2.5.1 and 8.1.
struct Packing {
  double scale = 1, offset = 0;
  bool is_scaled = false;    ///< there is a scale or an offset
  bool is_unsigned = false;  ///< the bits of signed integers stand for unsigned ones: attribute _Unsigned of NetCDF
  std::vector<double> missing = {};
};

/// The packing of a dataset; none if it has none of these attributes. `shown`: its name in errors. Throws an Error
/// (ExitCode::data) if scale_factor or add_offset is not one number.
std::optional<Packing> packing_of(hid_t dataset, const std::string& shown);

}  // namespace muster::detail::hdf5
