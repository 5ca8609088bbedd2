// How ranks divide the elements of an array: into one slice per rank, or into chunks that ranks claim one after
// another.
#pragma once

#include "node/dtype.hpp"
#include "node/shared_segment.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace muster::detail::node {

/// A range of elements.
struct Slice {
  std::size_t first = 0;
  std::size_t count = 0;

  /// Returns the part of this slice that begins at its element `begin` and has at most `most` elements.
  Slice chunk(std::size_t begin, std::size_t most) const {
    begin = std::min(begin, count);
    return {first + begin, std::min(most, count - begin)};
  }
};

/// Returns the slice of rank `owner` among `owners` ranks. Slices are whole cache lines, except at the end.
inline Slice slice_of(std::size_t count, int owners, int owner, Dtype type) {
  const auto unit = std::max<std::size_t>(1, cache_line / size_of(type));
  const auto units = (count + unit - 1) / unit;
  const auto each = (units + static_cast<std::size_t>(owners) - 1) / static_cast<std::size_t>(owners) * unit;
  return Slice{0, count}.chunk(each * static_cast<std::size_t>(owner), each);
}

/// Bytes that a rank claims at once.
constexpr std::size_t claimed_bytes = std::size_t{256} << 10;

/// A counter in memory that the ranks share, without a lock. All-zero memory is a valid initial state.
class ChunkCounter {
 public:
  /// Claims the next number of the round, from 0, which no other caller gets. None if may(number) is false.
  template <class May>
  std::optional<std::size_t> claim(std::uint64_t round, May&& may) {
    const std::uint64_t name = round << 32;
    auto now = last_.load(std::memory_order_relaxed);
    for (;;) {
      const auto next = (now & ~std::uint64_t{0xffffffff}) == name ? now & 0xffffffff : 0;
      if (!may(next)) return std::nullopt;
      if (last_.compare_exchange_weak(now, name | (next + 1), std::memory_order_relaxed)) return next;
    }
  }

 private:
  /// The round in the upper half and the next number in the lower half, so that nothing must be reset for a new round.
  std::atomic<std::uint64_t> last_;
};

}  // namespace muster::detail::node
