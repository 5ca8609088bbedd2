#include "hdf5/conversion.hpp"

#include "hdf5/types.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

/// How many values are converted at once. They are copied first, since the results overwrite their memory.
constexpr std::size_t tile = 512;

template <class Value>
void swap_bytes(std::array<Value, tile>& values, std::size_t count) {
  if constexpr (sizeof(Value) == 2) {
    for (std::size_t i = 0; i < count; ++i)
      values[i] = std::bit_cast<Value>(__builtin_bswap16(std::bit_cast<std::uint16_t>(values[i])));
  } else if constexpr (sizeof(Value) == 4) {
    for (std::size_t i = 0; i < count; ++i)
      values[i] = std::bit_cast<Value>(__builtin_bswap32(std::bit_cast<std::uint32_t>(values[i])));
  } else if constexpr (sizeof(Value) == 8) {
    for (std::size_t i = 0; i < count; ++i)
      values[i] = std::bit_cast<Value>(__builtin_bswap64(std::bit_cast<std::uint64_t>(values[i])));
  }
}

Handle swapped(hid_t native) {
  Handle type(check(H5Tcopy(native), "making a type"), H5Tclose);
  const auto other = H5Tget_order(native) == H5T_ORDER_LE ? H5T_ORDER_BE : H5T_ORDER_LE;
  check(H5Tset_order(type.get(), other), "making a type");
  return type;
}

/// The number as a value of the type. One that is too large for the type stays as it is.
double rounded_to(at::ScalarType type, double number) {
  const double rounded = type == at::kFloat      ? static_cast<double>(static_cast<float>(number))
                         : type == at::kHalf     ? static_cast<double>(c10::Half(static_cast<float>(number)))
                         : type == at::kBFloat16 ? static_cast<double>(c10::BFloat16(static_cast<float>(number)))
                                                 : number;
  return std::isinf(rounded) ? number : rounded;
}

Handle native_integer(std::size_t bytes, bool is_signed) {
  const hid_t types[][2] = {{H5T_NATIVE_UINT8, H5T_NATIVE_INT8},
                            {H5T_NATIVE_UINT16, H5T_NATIVE_INT16},
                            {H5T_NATIVE_UINT32, H5T_NATIVE_INT32},
                            {H5T_NATIVE_UINT64, H5T_NATIVE_INT64}};
  return {check(H5Tcopy(types[std::countr_zero(bytes)][is_signed ? 1 : 0]), "making a type"), H5Tclose};
}

}  // namespace

template <class Stored, class Value>
std::size_t Conversion::convert(const Conversion& conversion, const std::byte* from, std::byte* into,
                                std::size_t count) {
  std::array<Stored, tile> stored;
  std::array<Value, tile> values;
  for (std::size_t done = 0; done < count; done += tile) {
    const auto some = std::min(tile, count - done);
    std::memcpy(stored.data(), from + done * sizeof(Stored), some * sizeof(Stored));
    if (conversion.is_swapped_) swap_bytes(stored, some);
    if constexpr (std::same_as<Stored, std::uint64_t> && std::same_as<Value, std::int64_t>)
      for (std::size_t i = 0; i < some; ++i)
        if (stored[i] > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) return done + i;
    if constexpr (std::floating_point<Value>) {
      if (conversion.packing_) {
        const auto& packing = *conversion.packing_;
        const auto scale = packing.scale, offset = packing.offset;
        for (std::size_t i = 0; i < some; ++i)
          values[i] = static_cast<Value>(static_cast<double>(stored[i]) * scale + offset);
        for (const auto missing : packing.missing)
          for (std::size_t i = 0; i < some; ++i)
            values[i] = static_cast<double>(stored[i]) == missing ? std::numeric_limits<Value>::quiet_NaN() : values[i];
        if (const auto least = packing.least, most = packing.most;
            least > -Packing::no_limit || most < Packing::no_limit)
          for (std::size_t i = 0; i < some; ++i)
            if (static_cast<double>(stored[i]) < least || static_cast<double>(stored[i]) > most)
              values[i] = std::numeric_limits<Value>::quiet_NaN();
        std::memcpy(into + done * sizeof(Value), values.data(), some * sizeof(Value));
        continue;
      }
    }
    if constexpr (std::same_as<Value, bool>)  // a file may hold any byte, a bool only two
      for (std::size_t i = 0; i < some; ++i) values[i] = stored[i] != std::byte{0};
    else
      for (std::size_t i = 0; i < some; ++i) values[i] = static_cast<Value>(stored[i]);
    std::memcpy(into + done * sizeof(Value), values.data(), some * sizeof(Value));
  }
  return count;
}

std::size_t Conversion::operator()(std::byte* values, std::size_t count) const {
  if (convert_ == nullptr) return count;
  return convert_(*this, values + count * (c10::elementSize(dtype_) - stored_bytes_), values, count);
}

template <class Stored, class Value>
void Conversion::choose_for(at::ScalarType packed) {
  if (packing_) {
    dtype_ = packed;
    convert_ = packed == at::kFloat ? convert<Stored, float> : convert<Stored, double>;
  } else {
    dtype_ = c10::CppTypeToScalarType<Value>::value;
    convert_ = is_swapped_ || !std::same_as<Stored, Value> ? convert<Stored, Value> : nullptr;
  }
}

void Conversion::choose() {
  if (dtype_ == at::kBool) {
    convert_ = convert<std::byte, bool>;
  } else if (is_integer_ && stored_bytes_ == 1) {
    is_signed_ ? choose_for<std::int8_t>(at::kFloat) : choose_for<std::uint8_t>(at::kFloat);
  } else if (is_integer_ && stored_bytes_ == 2) {
    is_signed_ ? choose_for<std::int16_t>(at::kFloat) : choose_for<std::uint16_t, std::int32_t>(at::kFloat);
  } else if (is_integer_ && stored_bytes_ == 4) {
    is_signed_ ? choose_for<std::int32_t>() : choose_for<std::uint32_t, std::int64_t>();
  } else if (is_integer_) {
    is_signed_ ? choose_for<std::int64_t>() : choose_for<std::uint64_t, std::int64_t>();
  } else if (stored_bytes_ == 2) {
    half_is_bfloat_ ? choose_for<c10::BFloat16>(at::kFloat) : choose_for<c10::Half>(at::kFloat);
  } else if (stored_bytes_ == 4) {
    choose_for<float>(at::kFloat);
  } else {
    choose_for<double>();
  }
}

Conversion::Conversion(hid_t type, std::optional<Packing> packing, const std::string& shown)
    : packing_(std::move(packing)) {
  const Lock lock;
  dtype_ = scalar_type(type, shown);
  if (dtype_ == at::kBool || at::isComplexType(dtype_)) {
    packing_.reset();
    native_ = memory_type_of(dtype_);
    stored_bytes_ = c10::elementSize(dtype_);
    reads_file_ = H5Tequal(type, native_.get()) > 0;
    if (dtype_ == at::kBool) choose();
    return;
  }
  const Handle number(H5Tget_class(type) == H5T_ENUM ? H5Tget_super(type) : H5Tcopy(type), H5Tclose);
  stored_bytes_ = H5Tget_size(number.get());
  is_integer_ = H5Tget_class(number.get()) == H5T_INTEGER;
  is_signed_ = !is_integer_ || H5Tget_sign(number.get()) != H5T_SGN_NONE;
  half_is_bfloat_ = dtype_ == at::kBFloat16;
  native_ = is_integer_ ? native_integer(stored_bytes_, is_signed_) : memory_type_of(dtype_);
  is_swapped_ = H5Tequal(number.get(), native_.get()) == 0;
  reads_file_ = !is_swapped_ || H5Tequal(number.get(), swapped(native_.get()).get()) > 0;
  if (packing_) adapt_packing();
  choose();
}

void Conversion::adapt_packing() {
  const bool is_stored_signed = is_signed_;
  if (is_integer_ && packing_->is_unsigned) is_signed_ = !*packing_->is_unsigned;
  if (!packing_->is_scaled && (is_integer_ || !packing_->has_missing())) {
    // A missing value among integers that are not scaled stays the number that it is.
    packing_.reset();
    return;
  }
  // Makes an attribute's number comparable to values: it may have more digits, or a sign that _Unsigned changes.
  const auto adapted = [&](double number) {
    if (!is_integer_) return rounded_to(dtype_, number);
    const auto beyond = std::exp2(8 * static_cast<double>(stored_bytes_));
    if (is_stored_signed && !is_signed_ && number < 0) return number + beyond;
    return !is_stored_signed && is_signed_ && number >= beyond / 2 ? number - beyond : number;
  };
  for (auto& missing : packing_->missing) missing = adapted(missing);
  for (auto* const limit : {&packing_->least, &packing_->most}) {
    if (!std::isfinite(*limit)) continue;
    // A limit with a fraction cannot be meant for the stored integers; netCDF4 ignores it, too.
    const auto none = limit == &packing_->least ? -Packing::no_limit : Packing::no_limit;
    *limit = is_integer_ && *limit != std::floor(*limit) ? none : adapted(*limit);
  }
}

void Conversion::after_hdf5() {
  is_swapped_ = false;
  if (!at::isComplexType(dtype_)) choose();
}

}  // namespace muster::detail::hdf5
