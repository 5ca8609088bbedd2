#include "data/passes/length_buckets.hpp"

#include "support/bucket_order.hpp"
#include "unit/pass_world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace muster::detail::data::length_buckets_test {
namespace {

using pass_world::indices, pass_world::sorted, pass_world::Samples;

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
    const auto want = test::bucket_order(lengths, bucket, key);
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
