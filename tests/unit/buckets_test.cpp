#include "gradients/flat_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace muster::detail::gradients::buckets_test {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

/// From the last to the first.
Buckets assign_buckets(const std::vector<GradientSize>& sizes, std::size_t first_bytes, std::size_t bytes) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return gradients::assign_buckets(sizes, order, first_bytes, bytes);
}

TEST(Buckets, NoGradientsNoBuckets) { EXPECT_TRUE(assign_buckets({}, 1, 1).empty()); }

TEST(Buckets, GoInTheOrderThatIsGiven) {
  const std::vector<GradientSize> sizes{{10, 0}, {10, 0}, {10, 1}, {10, 0}, {10, 1}};
  const std::vector<std::size_t> order{3, 4, 0, 2, 1};
  EXPECT_EQ(gradients::assign_buckets(sizes, order, 20, 20), (Buckets{{3, 0}, {4, 2}, {1}}));
}

TEST(Buckets, GoFromTheLastToTheFirst) {
  const std::vector<GradientSize> sizes{{10}, {20}, {30}};
  EXPECT_EQ(assign_buckets(sizes, 1000, 1000), (Buckets{{2, 1, 0}}));
}

TEST(Buckets, TheFirstHasALimitOfItsOwn) {
  const std::vector<GradientSize> sizes{{10}, {10}, {10}, {10}, {10}, {10}};
  EXPECT_EQ(assign_buckets(sizes, 10, 30), (Buckets{{5}, {4, 3, 2}, {1, 0}}));
  EXPECT_EQ(assign_buckets(sizes, 25, 20), (Buckets{{5, 4}, {3, 2}, {1, 0}}));
}

TEST(Buckets, ALargeGradientIsAlone) {
  const std::vector<GradientSize> sizes{{5}, {1000}, {5}};
  EXPECT_EQ(assign_buckets(sizes, 10, 10), (Buckets{{2}, {1}, {0}}));
}

TEST(Buckets, ALimitOfNothingGivesEachItsOwn) {
  const std::vector<GradientSize> sizes{{1}, {1}, {1}};
  EXPECT_EQ(assign_buckets(sizes, 0, 0), (Buckets{{2}, {1}, {0}}));
}

TEST(Buckets, KindsDoNotMix) {
  const std::vector<GradientSize> sizes{{10, 0}, {10, 1}, {10, 0}, {10, 1}};
  EXPECT_EQ(assign_buckets(sizes, 100, 100), (Buckets{{3, 1}, {2, 0}})) << "index 1 is made before index 0";
  EXPECT_EQ(assign_buckets(sizes, 10, 100), (Buckets{{3}, {2}, {1}, {0}})) << "each kind has a first bucket";
}

TEST(Buckets, EveryIndexOnceAndNoneTooFull) {
  std::vector<GradientSize> sizes;
  std::uint32_t random = 1;
  for (int i = 0; i < 500; ++i) {
    random = random * 1664525u + 1013904223u;
    sizes.push_back({(random >> 16) % 300, static_cast<int>((random >> 8) % 3)});
  }
  const auto buckets = assign_buckets(sizes, 100, 1000);
  std::vector<std::size_t> seen;
  for (const auto& bucket : buckets) {
    std::size_t bytes = 0;
    for (const auto i : bucket) {
      bytes += sizes[i].bytes;
      EXPECT_EQ(sizes[i].kind, sizes[bucket.front()].kind);
    }
    EXPECT_TRUE(bytes <= 1000 || bucket.size() == 1);
    EXPECT_TRUE(std::is_sorted(bucket.rbegin(), bucket.rend()));
    seen.insert(seen.end(), bucket.begin(), bucket.end());
  }
  std::sort(seen.begin(), seen.end());
  ASSERT_EQ(seen.size(), sizes.size());
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i);
  EXPECT_TRUE(
      std::is_sorted(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); }));
}

}  // namespace
}  // namespace muster::detail::gradients::buckets_test
