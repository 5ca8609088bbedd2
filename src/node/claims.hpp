// How ranks share out chunks of work: whoever is early does more, and nobody waits for a turn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace muster::detail::node {

/// Bytes that a rank claims at once.
constexpr std::size_t claimed_bytes = std::size_t{256} << 10;

/// In memory that the ranks share; zeroes are its valid first state.
class Claims {
 public:
  /// The next number of the round, from 0 on, which nobody else gets; none where may(number) is false.
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
  /// The round in the upper half, the next number in the lower, so that nothing has to be reset.
  std::atomic<std::uint64_t> last_;
};

}  // namespace muster::detail::node
