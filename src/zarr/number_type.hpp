// The types of numbers in Zarr stores.
#pragma once

#include "hdf5/handle.hpp"
#include "muster/json.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace muster::detail::zarr {

/// Kinds are NumPy's: b boolean, i and u integers, f floating point, c complex; and B for bfloat16.
struct NumberType {
  char kind = 'u';
  std::size_t bytes = 1;
  bool is_big_endian = false;

  bool is_same_number(const NumberType& other) const { return kind == other.kind && bytes == other.bytes; }
  /// The bytes that change their order together.
  std::size_t part_bytes() const { return kind == 'c' ? bytes / 2 : bytes; }
  /// The HDF5 type in this machine's byte order.
  hdf5::Handle hdf5_type() const;
};

/// The type that metadata name: "<f4" of version 2, "float32" of version 3. Throws an Error that names the kind if it
/// is none of numbers that tensors hold. `doing`: for errors.
NumberType number_type(const Json& name, const std::string& doing);

/// The bytes of a value in this machine's byte order, of the JSON form in which metadata have a fill value. Null is 0.
/// Throws an Error if it is no number of this type.
std::vector<std::byte> value_bytes(const NumberType& type, const Json& value, const std::string& doing);

/// Calls action(std::type_identity<T>()) with the C++ type of integers and floats of at least 4 bytes. False if it is
/// another.
template <class Action>
bool with_type(const NumberType& type, Action&& action) {
  using std::type_identity;
  const bool is_signed = type.kind == 'i';
  if (is_signed || type.kind == 'u' || type.kind == 'b') {
    switch (type.bytes) {
      case 1:
        is_signed ? action(type_identity<std::int8_t>()) : action(type_identity<std::uint8_t>());
        break;
      case 2:
        is_signed ? action(type_identity<std::int16_t>()) : action(type_identity<std::uint16_t>());
        break;
      case 4:
        is_signed ? action(type_identity<std::int32_t>()) : action(type_identity<std::uint32_t>());
        break;
      default:
        is_signed ? action(type_identity<std::int64_t>()) : action(type_identity<std::uint64_t>());
    }
    return true;
  }
  if (type.kind != 'f' || type.bytes < 4) return false;
  type.bytes == 4 ? action(type_identity<float>()) : action(type_identity<double>());
  return true;
}

}  // namespace muster::detail::zarr
