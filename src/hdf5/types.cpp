#include "hdf5/types.hpp"

#include "base/text.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

constexpr const char* making = "making a type";

Handle copy_of(hid_t type) { return {check(H5Tcopy(type), making), H5Tclose}; }

/// A 16-bit float with `exponent` exponent bits: 5 for IEEE half, 8 for bfloat16.
Handle make_float16(std::size_t exponent) {
  auto type = copy_of(H5T_NATIVE_FLOAT);
  check(H5Tset_fields(type.get(), 15, 15 - exponent, exponent, 0, 15 - exponent), making);
  check(H5Tset_precision(type.get(), 16), making);
  check(H5Tset_size(type.get(), 2), making);
  check(H5Tset_ebias(type.get(), (std::size_t{1} << (exponent - 1)) - 1), making);
  return type;
}

Handle make_bool() {
  Handle type(check(H5Tenum_create(H5T_NATIVE_INT8), making), H5Tclose);
  const std::int8_t no = 0, yes = 1;
  check(H5Tenum_insert(type.get(), "FALSE", &no), making);
  check(H5Tenum_insert(type.get(), "TRUE", &yes), making);
  return type;
}

Handle make_complex(hid_t part) {
  const auto size = H5Tget_size(part);
  Handle type(check(H5Tcreate(H5T_COMPOUND, 2 * size), making), H5Tclose);
  check(H5Tinsert(type.get(), "r", 0, part), making);
  check(H5Tinsert(type.get(), "i", size, part), making);
  return type;
}

[[noreturn]] void refuse_type(const char* kind, const std::string& shown) {
  throw Error(ExitCode::data, "reading " + shown, str("it holds ", kind, ", but tensors can only hold numbers"),
              "Convert it, or choose other columns");
}

/// The fields of compound values that hold numbers, as names of columns.
std::string fields_of(hid_t type, const std::string& column) {
  std::string fields;
  for (int i = 0, count = H5Tget_nmembers(type); i < count; ++i) {
    const auto kind = H5Tget_member_class(type, static_cast<unsigned>(i));
    if (kind != H5T_INTEGER && kind != H5T_FLOAT && kind != H5T_ENUM) continue;
    char* const name = H5Tget_member_name(type, static_cast<unsigned>(i));
    fields += (fields.empty() ? "" : ", ") + column + "." + name;
    H5free_memory(name);
  }
  return fields;
}

[[noreturn]] void refuse_compound(hid_t type, const std::string& shown) {
  const auto column = shown.substr(shown.rfind('/') + 1);
  // A field of a field cannot be chosen.
  const auto fields = column.find('.') == std::string::npos ? fields_of(type, column) : "";
  throw Error(ExitCode::data, "reading " + shown, "it holds compound values, but tensors can only hold numbers",
              fields.empty() ? "Convert it, or choose other columns" : "Choose fields of it as columns: " + fields);
}

[[noreturn]] void refuse_size(const char* kind, std::size_t bytes, const char* sizes, const std::string& shown) {
  throw Error(ExitCode::data, "reading " + shown,
              str("it holds ", kind, " of ", counted(bytes, "byte"), "; tensors hold those of ", sizes),
              "Store them in one of these sizes, or choose other columns");
}

[[noreturn]] void refuse_class(H5T_class_t type, const std::string& shown) {
  constexpr std::pair<H5T_class_t, const char*> names[] = {
      {H5T_STRING, "strings"},      {H5T_REFERENCE, "references"},        {H5T_VLEN, "values of variable length"},
      {H5T_OPAQUE, "opaque bytes"}, {H5T_ARRAY, "arrays in one element"}, {H5T_TIME, "times"},
      {H5T_BITFIELD, "bit fields"}};
  for (const auto& [known, name] : names)
    if (known == type) refuse_type(name, shown);
  refuse_type("values of an unknown kind", shown);
}

at::ScalarType integer_type(std::size_t size, bool is_signed, const std::string& shown) {
  if (size == 1) return is_signed ? at::kChar : at::kByte;
  if (size == 2) return is_signed ? at::kShort : at::kInt;
  if (size == 4) return is_signed ? at::kInt : at::kLong;
  if (size == 8) return at::kLong;
  refuse_size("integers", size, "1, 2, 4 and 8", shown);
}

at::ScalarType float_type(hid_t type, const std::string& shown) {
  std::size_t sign, exponent, exponent_size, mantissa, mantissa_size;
  check(H5Tget_fields(type, &sign, &exponent, &exponent_size, &mantissa, &mantissa_size),
        "reading the type of " + shown);
  const auto size = H5Tget_size(type);
  if (size == 2) return exponent_size == 8 ? at::kBFloat16 : at::kHalf;
  if (size == 4) return at::kFloat;
  if (size == 8) return at::kDouble;
  refuse_size("floating-point numbers", size, "2, 4 and 8", shown);
}

at::ScalarType compound_type(hid_t type, const std::string& shown) {
  if (H5Tget_nmembers(type) == 2 && H5Tget_member_class(type, 0) == H5T_FLOAT &&
      H5Tget_member_class(type, 1) == H5T_FLOAT) {
    const std::array<char*, 2> names{H5Tget_member_name(type, 0), H5Tget_member_name(type, 1)};
    const bool complex = std::strcmp(names[0], "r") == 0 && std::strcmp(names[1], "i") == 0;
    for (char* name : names) H5free_memory(name);
    if (complex && H5Tget_size(type) == 8) return at::kComplexFloat;
    if (complex && H5Tget_size(type) == 16) return at::kComplexDouble;
  }
  refuse_compound(type, shown);
}

}  // namespace

Handle memory_type_of(at::ScalarType type) {
  const Lock lock;
  const std::pair<at::ScalarType, hid_t> native[] = {
      {at::kByte, H5T_NATIVE_UINT8},    {at::kChar, H5T_NATIVE_INT8},     {at::kUInt16, H5T_NATIVE_UINT16},
      {at::kUInt32, H5T_NATIVE_UINT32}, {at::kUInt64, H5T_NATIVE_UINT64}, {at::kShort, H5T_NATIVE_INT16},
      {at::kInt, H5T_NATIVE_INT32},     {at::kLong, H5T_NATIVE_INT64},    {at::kFloat, H5T_NATIVE_FLOAT},
      {at::kDouble, H5T_NATIVE_DOUBLE}};
  for (const auto& [known, id] : native)
    if (known == type) return copy_of(id);
  if (type == at::kHalf) return make_float16(5);
  if (type == at::kBFloat16) return make_float16(8);
  if (type == at::kBool) return make_bool();
  if (type == at::kComplexFloat) return make_complex(H5T_NATIVE_FLOAT);
  if (type == at::kComplexDouble) return make_complex(H5T_NATIVE_DOUBLE);
  throw Error(ExitCode::data, "storing a tensor", str("HDF5 has no type for ", c10::toString(type)),
              "Convert it to another type first");
}

bool has_type(at::ScalarType type) noexcept {
  static constexpr std::array known{at::kByte,  at::kUInt16,   at::kUInt32, at::kUInt64,       at::kChar,
                                    at::kShort, at::kInt,      at::kLong,   at::kFloat,        at::kDouble,
                                    at::kHalf,  at::kBFloat16, at::kBool,   at::kComplexFloat, at::kComplexDouble};
  return std::ranges::find(known, type) != known.end();
}

at::ScalarType scalar_type(hid_t type, const std::string& shown) {
  const Lock lock;
  const auto kind = H5Tget_class(type);
  if (kind == H5T_INTEGER) return integer_type(H5Tget_size(type), H5Tget_sign(type) != H5T_SGN_NONE, shown);
  if (kind == H5T_FLOAT) return float_type(type, shown);
  if (kind == H5T_COMPOUND) return compound_type(type, shown);
  if (kind == H5T_ENUM && H5Tequal(type, make_bool().get()) > 0) return at::kBool;
  if (kind == H5T_ENUM)
    return scalar_type(Handle(check(H5Tget_super(type), "reading the type of " + shown), H5Tclose).get(), shown);
  refuse_class(kind, shown);
}

}  // namespace muster::detail::hdf5
