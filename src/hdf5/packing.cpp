#include "hdf5/packing.hpp"

#include "base/text.hpp"
#include "hdf5/attributes.hpp"
#include "hdf5/types.hpp"
#include "muster/error.hpp"

#include <cmath>

namespace muster::detail::hdf5 {

std::optional<Packing> packing_of(hid_t dataset, hid_t type, const std::string& shown) {
  const Lock lock;
  const auto value_type = scalar_type(type, shown);
  if (value_type == at::kBool || at::isComplexType(value_type)) return {};
  const std::string doing = "reading the attributes of " + shown;
  Packing packing;
  for (const auto& [name, number] :
       {std::pair("scale_factor", &packing.scale), std::pair("add_offset", &packing.offset)}) {
    if (check(H5Aexists(dataset, name), doing) == 0) continue;
    const auto values = numbers_of_attribute(dataset, name, doing);
    if (values.size() != 1 || !std::isfinite(values.front()))
      throw Error(ExitCode::data, doing, str(name, " is not a number"), "Correct it, or choose other columns");
    *number = values.front();
    packing.is_scaled = true;
  }
  for (const char* name : {"_FillValue", "missing_value"})
    for (const auto value : numbers_of_attribute(dataset, name, doing)) packing.missing.push_back(value);
  const auto limit = [&](const char* name, std::vector<double*> into) {
    const auto values = numbers_of_attribute(dataset, name, doing);
    if (values.empty()) return;
    if (values.size() != into.size())
      throw Error(ExitCode::data, doing, str(name, " is not ", into.size() == 1 ? "a number" : "two numbers"),
                  "Correct it, or choose other columns");
    for (std::size_t i = 0; i < into.size(); ++i) *into[i] = values[i];
  };
  limit("valid_min", {&packing.least});
  limit("valid_max", {&packing.most});
  limit("valid_range", {&packing.least, &packing.most});
  const auto is_unsigned = text_of_attribute(dataset, "_Unsigned", doing);
  if (is_unsigned == "true" || is_unsigned == "True") packing.is_unsigned = true;
  if (is_unsigned == "false" || is_unsigned == "False") packing.is_unsigned = false;
  if (!packing.is_scaled && !packing.is_unsigned && !packing.has_missing()) return {};
  return packing;
}

}  // namespace muster::detail::hdf5
