#include "zarr/number_type.hpp"

#include "base/json.hpp"
#include "base/text.hpp"
#include "hdf5/types.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
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

/// A type as NumPy writes it: "<f4".
NumberType numpy_type(const std::string& text, const std::string& doing) {
  const auto order = text.substr(0, 1);
  const auto rest = text.substr(std::string("<>|=").find(order) == std::string::npos ? 0 : 1);
  constexpr std::pair<char, const char*> others[] = {{'S', "strings"},
                                                     {'a', "strings"},
                                                     {'U', "strings"},
                                                     {'O', "objects"},
                                                     {'V', "raw bytes"},
                                                     {'M', "dates (datetime64)"},
                                                     {'m', "spans of time (timedelta64)"}};
  const bool is_short = rest.size() < 2 || rest.find_first_of("0123456789") == 1;
  for (const auto& [kind, name] : others)
    if (is_short && rest.starts_with(kind)) refuse_kind(name, doing);
  constexpr const char* known[] = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"};
  if (std::ranges::find(known, rest) == std::end(known)) refuse_kind("values of type " + text, doing);
  return {.kind = rest[0], .bytes = static_cast<std::size_t>(std::stoi(rest.substr(1))), .is_big_endian = order == ">"};
}

/// The number of a float in JSON: also as text, "NaN", or as the hexadecimal digits of its bits.
std::optional<double> float_of(const Json& value, std::size_t bytes) {
  if (value.is_null()) return 0.0;
  if (value.is_number()) return value.get<double>();
  if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
  if (!value.is_string()) return {};
  const auto text = value.get<std::string>();
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (!text.starts_with("0x") || text.size() != 2 + 2 * bytes ||
      text.find_first_not_of("0123456789abcdefABCDEF", 2) != std::string::npos)
    return {};
  const auto bits = std::stoull(text.substr(2), nullptr, 16);
  if (bytes == 8) return std::bit_cast<double>(static_cast<std::uint64_t>(bits));
  if (bytes == 4) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  return static_cast<float>(c10::Half(static_cast<std::uint16_t>(bits), c10::Half::from_bits()));
}

template <class Value>
std::vector<std::byte> bytes_of(const Value& value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::vector<std::byte> float_bytes(char kind, std::size_t bytes, double number) {
  if (kind == 'B') return bytes_of(c10::BFloat16(static_cast<float>(number)).x);
  if (bytes == 2) return bytes_of(c10::Half(static_cast<float>(number)).x);
  if (bytes == 4) return bytes_of(static_cast<float>(number));
  return bytes_of(number);
}

}  // namespace

NumberType number_type(const Json& name, const std::string& doing) {
  if (name.is_array()) refuse_kind("compound values", doing);
  const auto& word = name.is_object() && name.contains("name") ? name.at("name") : name;
  if (!word.is_string()) refuse_kind("values of type " + json_text_lossy(name), doing);
  const auto text = word.get<std::string>();
  constexpr std::pair<const char*, const char*> of_version_3[] = {
      {"bool", "|b1"},   {"int8", "|i1"},   {"int16", "i2"},     {"int32", "i4"},      {"int64", "i8"},
      {"uint8", "|u1"},  {"uint16", "u2"},  {"uint32", "u4"},    {"uint64", "u8"},     {"float16", "f2"},
      {"float32", "f4"}, {"float64", "f8"}, {"complex64", "c8"}, {"complex128", "c16"}};
  if (text == "bfloat16") return {.kind = 'B', .bytes = 2};
  if (text == "string") refuse_kind("strings", doing);
  for (const auto& [word_of_3, numpys] : of_version_3)
    if (text == word_of_3) return numpy_type(numpys, doing);
  return numpy_type(text, doing);
}

hdf5::Handle NumberType::hdf5_type() const {
  const hdf5::Lock lock;
  constexpr std::pair<std::string_view, at::ScalarType> types[] = {
      {"b1", at::kBool},         {"i1", at::kChar},           {"i2", at::kShort},   {"i4", at::kInt},
      {"i8", at::kLong},         {"u1", at::kByte},           {"u2", at::kUInt16},  {"u4", at::kUInt32},
      {"u8", at::kUInt64},       {"f2", at::kHalf},           {"f4", at::kFloat},   {"f8", at::kDouble},
      {"c8", at::kComplexFloat}, {"c16", at::kComplexDouble}, {"B2", at::kBFloat16}};
  const auto name = str(kind, bytes);
  return hdf5::memory_type_of(std::ranges::find(types, name, [](const auto& type) { return type.first; })->second);
}

std::vector<std::byte> value_bytes(const NumberType& type, const Json& value, const std::string& doing) {
  const auto refuse = [&] {
    throw Error(ExitCode::data, doing, "its fill value, " + json_text_lossy(value) + ", is no number of its type",
                "Correct it, or choose other columns");
  };
  if (type.kind == 'c') {
    const Json parts = value.is_array() ? value : Json::array({value, 0});
    if (parts.size() != 2) refuse();
    std::vector<std::byte> bytes;
    for (const auto& part : parts) {
      const auto number = float_of(part, type.part_bytes());
      if (!number) refuse();
      std::ranges::copy(float_bytes('f', type.part_bytes(), *number), std::back_inserter(bytes));
    }
    return bytes;
  }
  if (type.kind == 'f' || type.kind == 'B') {
    const auto number = float_of(value, type.bytes);
    if (!number) refuse();
    return float_bytes(type.kind, type.bytes, *number);
  }
  std::vector<std::byte> bytes;
  with_type(type, [&]<class Value>(std::type_identity<Value>) {
    if constexpr (std::is_integral_v<Value>) {
      const auto take = [&](auto number) {
        if (std::in_range<Value>(number)) bytes = bytes_of(static_cast<Value>(number));
      };
      if (value.is_boolean() || value.is_null())
        take(value.is_boolean() && value.get<bool>() ? 1 : 0);
      else if (value.is_number_unsigned())
        take(value.get<std::uint64_t>());
      else if (value.is_number_integer())
        take(value.get<std::int64_t>());
      else if (value.is_number_float() && std::abs(value.get<double>()) < 0x1p53 &&
               value.get<double>() == std::floor(value.get<double>()))
        take(static_cast<std::int64_t>(value.get<double>()));
    }
  });
  if (bytes.empty()) refuse();
  return bytes;
}

}  // namespace muster::detail::zarr
