// Tests whether numbers are finite by their exponent bits, which costs less than reading them from memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace muster::detail::node {

/// True if all values, floats or doubles, are finite.
template <class T>
bool all_finite(const T* values, std::size_t count) noexcept {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits exponent = sizeof(T) == 4 ? Bits{0x7f800000} : static_cast<Bits>(0x7ff0000000000000);
  // Vectors by hand, since compilers do not vectorise this loop.
  constexpr std::size_t lanes = 32 / sizeof(T);
  using Vector [[gnu::vector_size(32)]] = Bits;
  Vector any{};
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    Vector bits;
    std::memcpy(&bits, values + i, sizeof bits);
    any |= (Vector)((bits & exponent) == exponent);
  }
  Bits bad = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane) bad |= any[lane];
  for (; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bad |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return bad == 0;
}

}  // namespace muster::detail::node
