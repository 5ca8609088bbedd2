// NetCDF's attributes of packed values.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// A stored value v stands for v × scale + offset, or for NaN if it is one of `missing`, below `least` or above `most`
/// (Conversion says what becomes of integers without a scale or offset). The values come from the attributes
/// scale_factor, add_offset, _FillValue, missing_value, valid_min, valid_max and valid_range of the CF conventions,
/// sections 2.5.1 and 8.1.
struct Packing {
  static constexpr double no_limit = std::numeric_limits<double>::infinity();

  double scale = 1, offset = 0;
  bool is_scaled = false;                ///< there is a scale or an offset
  std::optional<bool> is_unsigned = {};  ///< NetCDF's attribute _Unsigned, which overrides the sign of the type
  std::vector<double> missing = {};
  double least = -no_limit, most = no_limit;

  bool has_missing() const noexcept { return !missing.empty() || least > -no_limit || most < no_limit; }
};

/// The packing of a dataset, or of a field, with values of type `type`; none if it has none of Packing's attributes, or
/// if the values are booleans or complex. `shown`: its name in errors. Throws an Error (ExitCode::data) if the type is
/// not one of numbers, or if one of the attributes has too few or too many numbers, or a text that is no number.
MUSTER_INTERNAL_API std::optional<Packing> packing_of(hid_t dataset, hid_t type, const std::string& shown);

}  // namespace muster::detail::hdf5
