#include "data/sources/permutation.hpp"

#include "base/hash.hpp"

#include <algorithm>
#include <cmath>

namespace muster::detail::data {
namespace {

/// A number below `bound` (at most 2^32) from 32 random bits.
std::uint64_t below(std::uint64_t bound, std::uint64_t bits) noexcept { return ((bits >> 32) * bound) >> 32; }

}  // namespace

std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept { return scrambled(scrambled(a) ^ b); }

Permutation::Permutation(std::int64_t size, std::uint64_t key) noexcept : size_(static_cast<std::uint64_t>(size)) {
  // A small set is permuted inside a larger domain: a network over a handful of pairs has too few different functions.
  constexpr std::uint64_t smallest = 8;
  left_ = std::max(smallest, static_cast<std::uint64_t>(std::sqrt(static_cast<double>(size_))));
  right_ = std::max(smallest, (size_ + left_ - 1) / left_);
  for (auto& round_key : keys_) round_key = key = scrambled(key);
}

std::int64_t Permutation::operator()(std::int64_t index) const noexcept {
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value / right_, right = value % right_;
    for (int round = 0; round < rounds; round += 2) {
      left += below(left_, scrambled(right ^ keys_[round]));
      if (left >= left_) left -= left_;
      right += below(right_, scrambled(left ^ keys_[round + 1]));
      if (right >= right_) right -= right_;
    }
    value = left * right_ + right;
  } while (value >= size_);
  return static_cast<std::int64_t>(value);
}

}  // namespace muster::detail::data
