// The runs of a box: its pieces that are contiguous in each of two arrays, such as a file and the memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail {

/// A box, a rectangular part of both arrays, has one run for each index of its first `outer` dimensions. Each run has
/// `bytes` bytes.
struct Runs {
  std::size_t outer = 0, bytes = 0;

  /// `size`: values of the box along each dimension. `a`, `b`: the strides of the two arrays, in bytes. `value`: bytes
  /// of one value. A run takes in the last dimensions as long as both arrays are contiguous in them.
  Runs(std::span<const std::int64_t> size, std::span<const std::size_t> a, std::span<const std::size_t> b,
       std::size_t value) noexcept
      : outer(size.size()), bytes(value) {
    for (; outer > 0 && a[outer - 1] == bytes && b[outer - 1] == bytes; --outer)
      bytes *= static_cast<std::size_t>(size[outer - 1]);
  }
};

/// Calls action(a, b, bytes) for each run, where `a` and `b` are the run's offsets in the two arrays, in bytes from the
/// box's first value. The box must not be empty.
template <class Action>
void each_run(std::span<const std::int64_t> size, std::span<const std::size_t> a, std::span<const std::size_t> b,
              std::size_t value, Action&& action) {
  constexpr std::size_t most_dimensions = 33;  // HDF5 allows 32; the index of a Zarr shard has one more
  const Runs runs(size, a, b, value);
  std::array<std::int64_t, most_dimensions> at;
  for (std::size_t d = 0; d < runs.outer; ++d) at[d] = 0;
  std::size_t in_a = 0, in_b = 0;
  while (true) {
    action(in_a, in_b, runs.bytes);
    auto d = runs.outer;
    for (; d > 0; --d) {
      in_a += a[d - 1], in_b += b[d - 1];
      if (++at[d - 1] < size[d - 1]) break;
      in_a -= a[d - 1] * static_cast<std::size_t>(size[d - 1]);
      in_b -= b[d - 1] * static_cast<std::size_t>(size[d - 1]);
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace muster::detail
