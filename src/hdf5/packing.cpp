#include "hdf5/packing.hpp"

#include "muster/error.hpp"

#include <cmath>

namespace muster::detail::hdf5 {
namespace {

/// The values of a numeric attribute; none if there is no such attribute or it holds no numbers.
std::vector<double> numbers(hid_t dataset, const char* name, const std::string& doing) {
  if (check(H5Aexists(dataset, name), doing) == 0) return {};
  const Handle attribute(check(H5Aopen(dataset, name, H5P_DEFAULT), doing), H5Aclose);
  const Handle type(check(H5Aget_type(attribute.get()), doing), H5Tclose);
  const auto kind = H5Tget_class(type.get());
  if (kind != H5T_INTEGER && kind != H5T_FLOAT) return {};
  const Handle space(check(H5Aget_space(attribute.get()), doing), H5Sclose);
  constexpr hssize_t most = 16;
  const auto count = H5Sget_simple_extent_npoints(space.get());
  if (count < 1 || count > most) return {};
  std::vector<double> values(static_cast<std::size_t>(count));
  check(H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, values.data()), doing);
  return values;
}

}  // namespace

std::optional<Packing> packing_of(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the attributes of " + shown;
  Packing packing;
  for (const auto& [name, number] :
       {std::pair("scale_factor", &packing.scale), std::pair("add_offset", &packing.offset)}) {
    if (check(H5Aexists(dataset, name), doing) == 0) continue;
    const auto values = numbers(dataset, name, doing);
    if (values.size() != 1 || !std::isfinite(values.front()))
      throw Error(ExitCode::data, doing, std::string(name) + " is not a number", "Correct it, or choose other columns");
    *number = values.front();
    packing.is_scaled = true;
  }
  for (const char* name : {"_FillValue", "missing_value"})
    for (const auto value : numbers(dataset, name, doing)) packing.missing.push_back(value);
  if (!packing.is_scaled && packing.missing.empty()) return {};
  return packing;
}

}  // namespace muster::detail::hdf5
