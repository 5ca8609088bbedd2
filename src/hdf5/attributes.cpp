#include "hdf5/attributes.hpp"

namespace muster::detail::hdf5 {
namespace {

/// An attribute with its type and the number of its values; no handles if there is no such attribute.
struct Attribute {
  Attribute(hid_t dataset, const char* name, const std::string& doing) {
    if (check(H5Aexists(dataset, name), doing) == 0) return;
    attribute = {check(H5Aopen(dataset, name, H5P_DEFAULT), doing), H5Aclose};
    type = {check(H5Aget_type(attribute.get()), doing), H5Tclose};
    const Handle space(check(H5Aget_space(attribute.get()), doing), H5Sclose);
    count = H5Sget_simple_extent_npoints(space.get());
  }

  Handle attribute, type;
  hssize_t count = 0;
};

}  // namespace

std::vector<double> numbers_of_attribute(hid_t dataset, const char* name, const std::string& doing) {
  const Lock lock;
  const Attribute found(dataset, name, doing);
  if (found.count < 1) return {};
  const auto kind = H5Tget_class(found.type.get());
  if (kind != H5T_INTEGER && kind != H5T_FLOAT) return {};
  constexpr hssize_t most = 1024;
  if (found.count > most)
    throw Error(
        ExitCode::data, doing,
        std::string(name) + " has " + std::to_string(found.count) + " numbers; the most are " + std::to_string(most),
        "Shorten it, or choose other columns");
  std::vector<double> values(static_cast<std::size_t>(found.count));
  check(H5Aread(found.attribute.get(), H5T_NATIVE_DOUBLE, values.data()), doing);
  return values;
}

std::string text_of_attribute(hid_t dataset, const char* name, const std::string& doing) {
  const Lock lock;
  const Attribute found(dataset, name, doing);
  if (found.count != 1 || H5Tget_class(found.type.get()) != H5T_STRING) return {};
  if (H5Tis_variable_str(found.type.get()) > 0) {
    char* text = nullptr;
    check(H5Aread(found.attribute.get(), found.type.get(), static_cast<void*>(&text)), doing);
    std::string copy = text == nullptr ? "" : text;
    H5free_memory(text);
    return copy;
  }
  constexpr std::size_t most = 256;
  std::string text(H5Tget_size(found.type.get()), '\0');
  if (text.empty() || text.size() > most) return {};
  check(H5Aread(found.attribute.get(), found.type.get(), text.data()), doing);
  return text.c_str();  // without the padding
}

}  // namespace muster::detail::hdf5
