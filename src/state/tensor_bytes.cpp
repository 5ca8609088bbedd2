#include "state/tensor_bytes.hpp"

namespace muster::detail::state {

std::optional<std::uint64_t> tensor_bytes(at::ScalarType type, std::span<const std::int64_t> shape) {
  constexpr std::size_t max_dimensions = 32;  // the most that a dataset of HDF5, and so state.h5, can have
  if (shape.size() > max_dimensions) return {};
  auto bytes = static_cast<std::int64_t>(c10::elementSize(type));
  bool empty = false;
  for (const auto size : shape) {  // goes on after a 0: the strides of an empty tensor must not overflow
    if (size < 0 || (size > 0 && __builtin_mul_overflow(bytes, size, &bytes))) return {};
    empty = empty || size == 0;
  }
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

}  // namespace muster::detail::state
