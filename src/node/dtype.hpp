// Element types of collectives.
#pragma once

#include <cstddef>

namespace muster::detail::node {

/// Tables with an entry for each type have this order.
enum class Dtype { u8, i8, i16, i32, i64, f16, bf16, f32, f64, c64, c128, boolean };
inline constexpr std::size_t num_dtypes = static_cast<std::size_t>(Dtype::boolean) + 1;

/// Bytes of one element.
constexpr std::size_t size_of(Dtype type) noexcept {
  constexpr std::size_t bytes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1};
  static_assert(sizeof bytes == num_dtypes * sizeof *bytes);
  return bytes[static_cast<std::size_t>(type)];
}

}  // namespace muster::detail::node
