// Numbers from files, flags and environment variables, which are not trusted: parsing, casts and products with checks.
#pragma once

#include "base/text.hpp"
#include "muster/error.hpp"

#include <charconv>
#include <concepts>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

namespace muster::detail {

/// The number that the whole text stands for; empty if the text is not a number, or if it does not fit into Number.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

/// Converts `value` to To. Throws an Error if it does not fit: "DOING: WHAT is 9223372036854775808, more than
/// 9223372036854775807".
template <std::integral To, std::integral From>
To checked_cast(From value, std::string_view doing, std::string_view what, ExitCode code = ExitCode::data) {
  if (std::in_range<To>(value)) return static_cast<To>(value);
  const bool below = std::cmp_less(value, std::numeric_limits<To>::min());
  throw Error(code, doing,
              str(what, " is ", value, ", ", below ? "less than " : "more than ",
                  below ? std::numeric_limits<To>::min() : std::numeric_limits<To>::max()),
              "Give another, or make the file anew");
}

/// Returns a × b for non-negative numbers. Throws an Error if the product overflows T.
template <std::integral T>
T checked_product(T a, T b, std::string_view doing, std::string_view what, ExitCode code = ExitCode::data) {
  T product{};
  if (!__builtin_mul_overflow(a, b, &product)) return product;
  throw Error(code, doing, str(what, " is larger than any memory"), "Give another, or make the file anew");
}

}  // namespace muster::detail
