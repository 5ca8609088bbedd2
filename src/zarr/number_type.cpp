#include "zarr/number_type.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <optional>
#include <string_view>

namespace muster::detail::zarr {
namespace {

std::optional<at::Scalar> number_of(const Json& value) {
  if (value.is_null()) return 0;
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_unsigned()) return value.get<std::uint64_t>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value != "NaN" && value != "Infinity" && value != "-Infinity") return {};
  return std::strtod(value.get_ref<const std::string&>().c_str(), nullptr);
}

/// The bytes of a number that is not complex; none if the value is no number of its type.
std::vector<std::byte> number_bytes(at::ScalarType scalar, const Json& value) try {
  std::vector<std::byte> bytes(c10::elementSize(scalar));
  const bool is_float = c10::isFloatingType(scalar);
  // The bits of a float may be given in hexadecimal digits: "0x7fc00000".
  const std::string_view text = value.is_string() ? value.get_ref<const std::string&>() : std::string_view();
  if (std::uint64_t bits = 0; is_float && text.starts_with("0x") && text.size() == 2 + 2 * bytes.size()) {
    if (std::from_chars(text.begin() + 2, text.end(), bits, 16).ptr != text.end()) return {};
    std::memcpy(bytes.data(), &bits, bytes.size());
    return bytes;
  }
  const auto number = number_of(value);
  if (!number || (!is_float && value.is_number_float() && std::floor(number->toDouble()) != number->toDouble()) ||
      (!is_float && !c10::isSignedType(scalar) && value.is_number() && number->toDouble() < 0))
    return {};
  std::memcpy(bytes.data(), at::scalar_tensor(*number, scalar).const_data_ptr(), bytes.size());
  return bytes;
} catch (const std::exception&) {  // the number does not fit its type
  return {};
}

/// What values of an unknown type are, for people. `rest`: the type's name without the order of bytes.
std::string kind_of(const Json& name, const std::string& text, std::string_view rest) {
  constexpr std::string_view others[] = {"S strings",
                                         "a strings",
                                         "U strings",
                                         "O objects",
                                         "V raw bytes",
                                         "M dates (datetime64)",
                                         "m spans of time (timedelta64)"};
  for (const auto& other : others)
    if (rest.substr(0, 1) == other.substr(0, 1) && (rest.size() == 1 || std::isdigit(rest[1]) != 0 || rest[1] == '['))
      return std::string(other.substr(2));
  return name.is_array() ? "compound values" : text == "string" ? "strings" : "values of type " + text;
}

}  // namespace

NumberType number_type(const Json& name, const std::string& doing) {
  constexpr at::ScalarType types[] = {at::kBool,  at::kChar,   at::kShort,        at::kInt,           at::kLong,
                                      at::kByte,  at::kUInt16, at::kUInt32,       at::kUInt64,        at::kHalf,
                                      at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kBFloat16};
  // The names of each type in versions 2 and 3.
  constexpr std::string_view names[] = {"b1", "bool",      "i1",  "int8",       "i2",       "int16",   "i4", "int32",
                                        "i8", "int64",     "u1",  "uint8",      "u2",       "uint16",  "u4", "uint32",
                                        "u8", "uint64",    "f2",  "float16",    "f4",       "float32", "f8", "float64",
                                        "c8", "complex64", "c16", "complex128", "bfloat16", "bfloat16"};
  const auto& word = name.is_object() && name.contains("name") ? name.at("name") : name;
  const auto text = word.is_string() ? word.get<std::string>() : json_text_lossy(name);
  auto rest = std::string_view(text);
  if (rest.find_first_of("<>|=") == 0) rest.remove_prefix(1);
  if (const auto known = std::ranges::find(names, rest); word.is_string() && known != std::end(names))
    return {types[(known - std::begin(names)) / 2], text[0] == '>'};
  throw Error(ExitCode::data, doing, "it holds " + kind_of(name, text, rest) + ", but tensors can only hold numbers",
              "Convert it, or choose other columns");
}

std::vector<std::byte> value_bytes(const NumberType& type, const Json& value, const std::string& doing) {
  const auto part = c10::toRealValueType(type.scalar);
  const bool is_complex = part != type.scalar, has_parts = is_complex && value.is_array() && value.size() == 2;
  auto bytes = number_bytes(part, has_parts ? value[0] : value);
  const auto imaginary = number_bytes(part, has_parts ? value[1] : Json(0));
  if (is_complex) bytes.insert(bytes.end(), imaginary.begin(), imaginary.end());
  if (bytes.size() != type.bytes())
    throw Error(ExitCode::data, doing, "its fill value, " + json_text_lossy(value) + ", is no number of its type",
                "Correct it, or choose other columns");
  return bytes;
}

}  // namespace muster::detail::zarr
