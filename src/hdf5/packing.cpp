#include "hdf5/packing.hpp"

#include "hdf5/attributes.hpp"
#include "muster/error.hpp"

#include <cmath>

namespace muster::detail::hdf5 {

std::optional<Packing> packing_of(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the attributes of " + shown;
  Packing packing;
  for (const auto& [name, number] :
       {std::pair("scale_factor", &packing.scale), std::pair("add_offset", &packing.offset)}) {
    if (check(H5Aexists(dataset, name), doing) == 0) continue;
    const auto values = numbers_of_attribute(dataset, name, doing);
    if (values.size() != 1 || !std::isfinite(values.front()))
      throw Error(ExitCode::data, doing, std::string(name) + " is not a number", "Correct it, or choose other columns");
    *number = values.front();
    packing.is_scaled = true;
  }
  for (const char* name : {"_FillValue", "missing_value"})
    for (const auto value : numbers_of_attribute(dataset, name, doing)) packing.missing.push_back(value);
  packing.is_unsigned = text_of_attribute(dataset, "_Unsigned", doing) == "true";
  if (!packing.is_scaled && !packing.is_unsigned && packing.missing.empty()) return {};
  return packing;
}

}  // namespace muster::detail::hdf5
