// The types of elements that collectives move and reduce.
#pragma once

#include <cstddef>

namespace muster::detail::node {

enum class Dtype { u8, i8, i16, i32, i64, f16, bf16, f32, f64, c64, c128, boolean };

/// Bytes of one element.
constexpr std::size_t size_of(Dtype type) noexcept {
  switch (type) {
    case Dtype::u8:
    case Dtype::i8:
    case Dtype::boolean:
      return 1;
    case Dtype::i16:
    case Dtype::f16:
    case Dtype::bf16:
      return 2;
    case Dtype::i32:
    case Dtype::f32:
      return 4;
    case Dtype::i64:
    case Dtype::f64:
    case Dtype::c64:
      return 8;
    case Dtype::c128:
      return 16;
  }
  return 0;
}

}  // namespace muster::detail::node
