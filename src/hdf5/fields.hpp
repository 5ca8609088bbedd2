// A field of compound values can be a column: "particles.mass" is the field `mass` of the dataset `particles`.
#pragma once

#include "base/export.hpp"
#include "hdf5/handle.hpp"

#include <string>
#include <utility>

namespace muster::detail::hdf5 {

/// Splits a column's name into the names of a dataset and of a field. The field is empty if whole values are meant.
MUSTER_INTERNAL_API std::pair<std::string, std::string> parts_of(hid_t file, const std::string& name);
/// The type of a field of compound values of type `type`. Throws an Error (ExitCode::data) that lists the fields if
/// there is none of that name.
MUSTER_INTERNAL_API Handle type_of_field(hid_t type, const std::string& field, const std::string& doing);
/// The memory type by which HDF5 reads only this field, as values of type `type`.
Handle only_field(const std::string& field, hid_t type, const std::string& doing);

}  // namespace muster::detail::hdf5
