#include "zarr/number_type.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace muster::detail::zarr {
namespace {

[[noreturn]] void refuse_kind(const std::string& kind, const std::string& doing) {
  throw Error(ExitCode::data, doing, "it holds " + kind + ", but tensors can only hold numbers",
              "Convert it, or choose other columns");
}

std::optional<double> float_of(const Json& value) {
  if (value.is_null()) return 0.0;
  if (value.is_number()) return value.get<double>();
  if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  return {};
}

/// The bits of a float of so many bytes, from their hexadecimal digits: "0x7fc00000".
std::optional<std::uint64_t> bits_of(const Json& value, std::size_t bytes) {
  const std::string_view text = value.is_string() ? value.get_ref<const std::string&>() : std::string_view();
  std::uint64_t bits = 0;
  if (!text.starts_with("0x") || text.size() != 2 + 2 * bytes) return {};
  const auto [end, error] = std::from_chars(text.data() + 2, text.data() + text.size(), bits, 16);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(bits) : std::nullopt;
}

/// The bytes of a number that is not complex; none if the value is no number of its type.
std::vector<std::byte> number_bytes(at::ScalarType scalar, const Json& value) {
  std::vector<std::byte> bytes(c10::elementSize(scalar));
  if (const auto bits = c10::isFloatingType(scalar) ? bits_of(value, bytes.size()) : std::nullopt) {
    std::memcpy(bytes.data(), &*bits, bytes.size());
    return bytes;
  }
  const auto take = [&]<class Value>(std::type_identity<Value>) {
    std::optional<Value> number;
    if constexpr (std::is_integral_v<Value>) {
      const auto take_if_in_range = [&](auto given) {
        if (std::in_range<Value>(given)) number = static_cast<Value>(given);
      };
      if (value.is_boolean() || value.is_null())
        number = value == true ? Value{1} : Value{0};
      else if (value.is_number_unsigned())
        take_if_in_range(value.get<std::uint64_t>());
      else if (value.is_number_integer())
        take_if_in_range(value.get<std::int64_t>());
      else if (value.is_number_float() && std::abs(value.get<double>()) < 0x1p53 &&
               value.get<double>() == std::floor(value.get<double>()))
        take_if_in_range(static_cast<std::int64_t>(value.get<double>()));
    } else if (const auto given = float_of(value)) {
      if constexpr (std::is_same_v<Value, double>)
        number = *given;
      else
        number = static_cast<Value>(static_cast<float>(*given));
    }
    bytes.resize(number ? bytes.size() : 0);
    if (number) std::memcpy(bytes.data(), &*number, sizeof *number);
  };
  with_one_of<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t,
              std::uint64_t, c10::Half, c10::BFloat16, float, double>(scalar == at::kBool ? at::kByte : scalar, take);
  return bytes;
}

}  // namespace

NumberType number_type(const Json& name, const std::string& doing) {
  struct Known {
    at::ScalarType scalar;
    std::string_view of_version_2, of_version_3;
  };
  constexpr Known all[] = {{at::kBool, "b1", "bool"},
                           {at::kChar, "i1", "int8"},
                           {at::kShort, "i2", "int16"},
                           {at::kInt, "i4", "int32"},
                           {at::kLong, "i8", "int64"},
                           {at::kByte, "u1", "uint8"},
                           {at::kUInt16, "u2", "uint16"},
                           {at::kUInt32, "u4", "uint32"},
                           {at::kUInt64, "u8", "uint64"},
                           {at::kHalf, "f2", "float16"},
                           {at::kFloat, "f4", "float32"},
                           {at::kDouble, "f8", "float64"},
                           {at::kComplexFloat, "c8", "complex64"},
                           {at::kComplexDouble, "c16", "complex128"},
                           {at::kBFloat16, "bfloat16", "bfloat16"}};
  constexpr std::pair<char, const char*> others[] = {{'S', "strings"},
                                                     {'a', "strings"},
                                                     {'U', "strings"},
                                                     {'O', "objects"},
                                                     {'V', "raw bytes"},
                                                     {'M', "dates (datetime64)"},
                                                     {'m', "spans of time (timedelta64)"}};
  if (name.is_array()) refuse_kind("compound values", doing);
  const auto& word = name.is_object() && name.contains("name") ? name.at("name") : name;
  if (!word.is_string()) refuse_kind("values of type " + json_text_lossy(name), doing);
  const auto& text = word.get_ref<const std::string&>();
  if (text == "string") refuse_kind("strings", doing);
  const bool has_order = !text.empty() && std::string_view("<>|=").find(text[0]) != std::string_view::npos;
  const auto rest = std::string_view(text).substr(has_order ? 1 : 0);
  for (const auto& known : all)
    if (rest == known.of_version_2 || rest == known.of_version_3) return {known.scalar, text[0] == '>'};
  for (const auto& [kind, kind_name] : others)
    if (rest.starts_with(kind) && (rest.size() == 1 || std::string_view("0123456789").find(rest[1]) != rest.npos))
      refuse_kind(kind_name, doing);
  refuse_kind("values of type " + text, doing);
}

std::vector<std::byte> value_bytes(const NumberType& type, const Json& value, const std::string& doing) {
  const auto part = c10::toRealValueType(type.scalar);
  const bool has_parts = part != type.scalar && value.is_array() && value.size() == 2;
  auto bytes = number_bytes(part, has_parts ? value[0] : value);
  if (part != type.scalar) {
    const auto imaginary = number_bytes(part, has_parts ? value[1] : Json(0));
    // Both, or none.
    bytes.resize(bytes.size() == imaginary.size() ? bytes.size() : 0);
    if (!bytes.empty()) bytes.insert(bytes.end(), imaginary.begin(), imaginary.end());
  }
  if (bytes.empty())
    throw Error(ExitCode::data, doing, "its fill value, " + json_text_lossy(value) + ", is no number of its type",
                "Correct it, or choose other columns");
  return bytes;
}

}  // namespace muster::detail::zarr
