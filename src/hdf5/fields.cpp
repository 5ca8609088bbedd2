#include "hdf5/fields.hpp"

namespace muster::detail::hdf5 {

std::pair<std::string, std::string> parts_of(hid_t file, const std::string& name) {
  const auto exists = [&](const std::string& link) {
    const auto found = H5Lexists(file, link.c_str(), H5P_DEFAULT);
    if (found < 0) last_error();
    return found > 0;
  };
  const auto dot = name.rfind('.');
  if (dot == std::string::npos || exists(name) || !exists(name.substr(0, dot))) return {name, ""};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

Handle type_of_field(hid_t type, const std::string& field, const std::string& doing) {
  const int count = H5Tget_class(type) == H5T_COMPOUND ? H5Tget_nmembers(type) : 0;
  std::string names;
  for (int i = 0; i < count; ++i) {
    char* const name = H5Tget_member_name(type, static_cast<unsigned>(i));
    if (name == field) {
      H5free_memory(name);
      return {check(H5Tget_member_type(type, static_cast<unsigned>(i)), doing), H5Tclose};
    }
    names += (names.empty() ? "" : ", ") + std::string(name);
    H5free_memory(name);
  }
  throw Error(ExitCode::data, doing, "its values have no field \"" + field + "\"",
              names.empty() ? "Choose it without a field" : "Its fields are " + names);
}

Handle only_field(const std::string& field, hid_t type, const std::string& doing) {
  Handle compound(check(H5Tcreate(H5T_COMPOUND, H5Tget_size(type)), doing), H5Tclose);
  check(H5Tinsert(compound.get(), field.c_str(), 0, type), doing);
  return compound;
}

}  // namespace muster::detail::hdf5
