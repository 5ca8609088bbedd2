// A permutation that needs no memory.
#pragma once

#include <cstdint>

namespace muster::detail::data {

/// A permutation of 0 … size − 1 drawn from `key`, evaluated at an index in constant memory; the same on every machine.
///
/// A Feistel network over pairs (left, right) with left < a, right < b, a × b ≥ size, as in Black and Rogaway, "Ciphers
/// with arbitrary finite domains" (2002); a value outside of the domain is passed through the network again.
class Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t key) noexcept;
  std::int64_t operator()(std::int64_t index) const noexcept;

 private:
  static constexpr int rounds = 8;
  std::uint64_t size_, left_, right_;
  std::uint64_t keys_[rounds];
};

/// A hash of a pair of numbers, the same on every machine.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept;

}  // namespace muster::detail::data
