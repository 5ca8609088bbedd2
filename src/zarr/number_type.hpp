// The types of numbers in Zarr stores.
#pragma once

#include "muster/json.hpp"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <vector>

namespace muster::detail::zarr {

struct NumberType {
  at::ScalarType scalar = at::kByte;
  bool is_big_endian = false;

  std::size_t bytes() const { return c10::elementSize(scalar); }
  /// The bytes that are swapped together: those of a number, or of one part of a complex number.
  std::size_t part_bytes() const { return c10::elementSize(c10::toRealValueType(scalar)); }
};

/// The type with this name in metadata: "<f4" in version 2, "float32" in version 3. Throws an Error that names the kind
/// if it is not a type of numbers that tensors hold. `doing`: for errors.
NumberType number_type(const Json& name, const std::string& doing);

/// Converts a fill value, in the JSON form that metadata have, to its bytes in this machine's byte order. Null is 0.
/// Throws an Error if it is no number of this type.
std::vector<std::byte> value_bytes(const NumberType& type, const Json& value, const std::string& doing);

}  // namespace muster::detail::zarr
