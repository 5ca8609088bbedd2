// Conversion between HDF5's types and torch's.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <c10/core/ScalarType.h>

#include <string>

namespace muster::detail::hdf5 {

/// The HDF5 memory type for a torch type: bfloat16 as a 16-bit float of 8 exponent bits, half as IEEE, bool as h5py's
/// enumeration of FALSE and TRUE over int8, complex as h5py's compound of r and i.
MUSTER_INTERNAL_API Handle memory_type_of(at::ScalarType type);
/// True if there is an HDF5 type for `type`. If not, memory_type_of() throws.
bool has_type(at::ScalarType type) noexcept;
/// The torch type for values of a stored type in any byte order. uint16 and uint32 become the next larger signed type,
/// uint64 becomes int64, h5py's booleans become bool, and other enumerations become their integers. Throws an Error
/// that names the kind for strings, references, compounds that are no complex numbers, and so on.
MUSTER_INTERNAL_API at::ScalarType scalar_type(hid_t type, const std::string& shown);

}  // namespace muster::detail::hdf5
