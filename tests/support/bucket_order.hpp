// The order of BatchOptions::bucket_samples by its definition, made as a whole: the reference for LengthBuckets.
#pragma once

#include "data/sources/permutation.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace muster::test {

inline std::vector<std::int64_t> bucket_order(const std::vector<std::int64_t>& lengths, std::int64_t bucket,
                                              std::uint64_t key) {
  using detail::data::mix, detail::data::Permutation;
  using Samples = std::vector<std::int64_t>;
  const auto size = std::ssize(lengths);
  Samples order;
  for (std::int64_t begin = 0, window = 0; begin < size; begin += 100 * bucket, ++window) {
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> by_length;  // (length, place in the shuffled order)
    for (auto place = begin; place < std::min(size, begin + 100 * bucket); ++place) {
      const auto sample = Permutation(size, key)(place);
      by_length[{lengths[static_cast<std::size_t>(sample)], place}] = sample;
    }
    std::vector<Samples> buckets(1);
    for (const auto& [place, sample] : by_length) {
      if (std::ssize(buckets.back()) == bucket) buckets.emplace_back();
      buckets.back().push_back(sample);
    }
    const auto whole = std::ssize(buckets) - (std::ssize(buckets.back()) < bucket ? 1 : 0);
    const auto window_key = mix(key, static_cast<std::uint64_t>(window) + 1);
    for (std::int64_t b = 0; b < std::ssize(buckets); ++b) {
      const auto number = b < whole ? Permutation(whole, mix(window_key, 0))(b) : b;
      const auto& chosen = buckets[static_cast<std::size_t>(number)];
      const Permutation rows(std::ssize(chosen), mix(window_key, static_cast<std::uint64_t>(number) + 1));
      for (std::int64_t row = 0; row < std::ssize(chosen); ++row)
        order.push_back(chosen[static_cast<std::size_t>(rows(row))]);
    }
  }
  return order;
}

}  // namespace muster::test
