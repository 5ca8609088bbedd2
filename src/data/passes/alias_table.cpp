#include "data/passes/alias_table.hpp"

#include "data/sources/permutation.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace muster::detail::data {
namespace {

__extension__ using Wide = unsigned __int128;

/// A number below `bound` from 64 random bits.
std::uint64_t scaled_below(std::uint64_t bound, std::uint64_t bits) noexcept {
  return static_cast<std::uint64_t>((Wide{bits} * bound) >> 64);
}

/// Whole numbers in proportion to the weights. Their sum is about 2^62.
std::vector<std::uint64_t> quantized(std::span<const double> weights) {
  // Dividing by the largest weight keeps the sum and the scale from overflow.
  const double largest = std::ranges::max(weights);
  double sum = 0;
  for (const auto weight : weights) sum += weight / largest;
  const double scale = std::exp2(62) / sum;
  std::vector<std::uint64_t> whole;
  whole.reserve(weights.size());
  for (const auto weight : weights) whole.push_back(static_cast<std::uint64_t>(std::rint(weight / largest * scale)));
  return whole;
}

std::uint64_t hash_of_weights(std::span<const double> weights) noexcept {
  std::uint64_t hash = weights.size();
  for (const auto weight : weights) hash = mix(hash, std::bit_cast<std::uint64_t>(weight + 0.0));  // −0 becomes 0
  return hash;
}

}  // namespace

AliasTable::AliasTable(std::span<const double> weights) : columns_(weights.size()), hash_(hash_of_weights(weights)) {
  const auto whole = quantized(weights);
  total_ = std::reduce(whole.begin(), whole.end());
  const auto count = whole.size();
  // A column holds `total_`; item i has whole[i] × count to put into columns.
  std::vector<Wide> left(count);
  std::vector<std::uint64_t> order(count);  // items with less than a column from the front, the others from the back
  std::size_t small = 0, large = count;
  for (std::size_t i = 0; i < count; ++i) {
    left[i] = Wide{whole[i]} * count;
    (left[i] < total_ ? order[small++] : order[--large]) = i;
  }
  while (small > 0 && large < count) {
    const auto item = order[--small], other = order[large];
    columns_[item] = {static_cast<std::uint64_t>(left[item]), other};
    left[other] -= total_ - left[item];
    if (left[other] < total_) {
      ++large;
      order[small++] = other;
    }
  }
  for (; large < count; ++large) columns_[order[large]] = {total_, order[large]};
}

std::int64_t AliasTable::operator()(std::uint64_t column, std::uint64_t coin) const noexcept {
  const auto chosen = scaled_below(columns_.size(), column);
  const auto& [own, alias] = columns_[chosen];
  return static_cast<std::int64_t>(scaled_below(total_, coin) < own ? chosen : alias);
}

}  // namespace muster::detail::data
