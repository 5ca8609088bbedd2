#include "data/passes/length_buckets.hpp"

#include "unit/pass_world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace muster::detail::data::length_buckets_test {
namespace {

using pass_world::indices, pass_world::sorted, pass_world::Samples;

/// The order by its definition, made as a whole.
Samples reference(const Samples& lengths, std::int64_t bucket, std::uint64_t key) {
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

Samples random_lengths(std::mt19937_64& random, std::size_t size, std::uint64_t most) {
  Samples lengths(size);
  for (auto& length : lengths) length = static_cast<std::int64_t>(random() % most);
  return lengths;
}

TEST(LengthBuckets, AreTheOrderOfTheirDefinition) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const auto lengths = random_lengths(random, 1 + random() % 900, 1 + random() % 50);
    const auto bucket = static_cast<std::int64_t>(1 + random() % (round % 2 == 0 ? 5 : 1000));
    const auto key = random();
    const LengthBuckets order(std::make_shared<Lengths>(lengths), bucket, key);
    const auto want = reference(lengths, bucket, key);
    Samples have;
    for (std::int64_t i = 0; i < std::ssize(lengths); ++i) have.push_back(order(i));
    ASSERT_EQ(have, want) << lengths.size() << " in buckets of " << bucket;
    EXPECT_EQ(sorted(have), indices(std::ssize(lengths)));
    for (int look = 0; look < 20; ++look) {
      const auto position = random() % lengths.size();
      EXPECT_EQ(order(static_cast<std::int64_t>(position)), want[position]) << "in any order of the positions";
    }
  }
}

TEST(LengthBuckets, OfAnySizeDoNotOverflow) {
  const auto lengths = std::make_shared<Lengths>(Samples{3, 1, 2});
  Samples have;
  const LengthBuckets order(lengths, std::numeric_limits<std::int64_t>::max(), 1);
  for (std::int64_t i = 0; i < 3; ++i) have.push_back(order(i));
  EXPECT_EQ(sorted(have), indices(3));
}

/// The values that padding adds if each step pads to its longest sample.
std::int64_t padding(const Samples& order, const Samples& lengths, std::size_t step) {
  std::int64_t added = 0;
  for (std::size_t first = 0; first < order.size(); first += step) {
    const auto end = std::min(order.size(), first + step);
    std::int64_t longest = 0, sum = 0;
    for (auto i = first; i < end; ++i) {
      const auto length = lengths[static_cast<std::size_t>(order[i])];
      longest = std::max(longest, length);
      sum += length;
    }
    added += longest * static_cast<std::int64_t>(end - first) - sum;
  }
  return added;
}

TEST(LengthBuckets, NeedLittlePadding) {
  std::mt19937_64 random(5);
  const auto lengths = random_lengths(random, 20'000, 500);
  const LengthBuckets buckets(std::make_shared<Lengths>(lengths), 32, 9);
  Samples order, plain;
  for (std::int64_t i = 0; i < std::ssize(lengths); ++i) {
    order.push_back(buckets(i));
    plain.push_back(Permutation(std::ssize(lengths), 9)(i));
  }
  EXPECT_LT(padding(order, lengths, 32) * 50, padding(plain, lengths, 32));
}

}  // namespace
}  // namespace muster::detail::data::length_buckets_test
