// Single values of a state as JSON, and back. JSON knows no infinity and no NaN; here they are the strings "inf",
// "-inf", "nan".
#pragma once

#include "muster/json.hpp"

#include <cmath>
#include <concepts>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

namespace muster::detail::checkpoint {

inline Json number_to_json(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

inline std::optional<double> number_from_json(const Json& json) {
  if (json.is_number()) return json.get<double>();
  if (json == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (json == "inf") return std::numeric_limits<double>::infinity();
  if (json == "-inf") return -std::numeric_limits<double>::infinity();
  return {};
}

/// A number, a bool, a string, JSON; two numbers; one of these that may be missing.
template <class T>
Json value_to_json(const T& value) {
  if constexpr (std::floating_point<T>)
    return number_to_json(value);
  else if constexpr (std::same_as<T, std::tuple<double, double>>)
    return Json::array({number_to_json(std::get<0>(value)), number_to_json(std::get<1>(value))});
  else if constexpr (requires { value.has_value(); })
    return value ? value_to_json(*value) : Json();
  else
    return value;
}

/// False if it is something else.
template <class T>
bool value_from_json(const Json& json, T& value) {
  if constexpr (std::floating_point<T>) {
    const auto number = number_from_json(json);
    if (number) value = static_cast<T>(*number);
    return number.has_value();
  } else if constexpr (std::same_as<T, std::tuple<double, double>>) {
    return json.is_array() && json.size() == 2 && value_from_json(json[0], std::get<0>(value)) &&
           value_from_json(json[1], std::get<1>(value));
  } else if constexpr (requires { value.has_value(); }) {
    value.reset();
    return json.is_null() || value_from_json(json, value.emplace());
  } else {
    const bool fits = std::same_as<T, bool> ? json.is_boolean()
                      : std::integral<T>    ? json.is_number_integer()
                                            : !std::same_as<T, std::string> || json.is_string();
    if (fits) value = json.get<T>();
    return fits;
  }
}

}  // namespace muster::detail::checkpoint
