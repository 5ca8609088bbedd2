#include "data/passes/samples.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>
#include <vector>

namespace muster::detail::data::samples_test {
namespace {

using Samples = std::vector<std::int64_t>;

Samples all_of(const Order& order) {
  Samples samples;
  for (std::int64_t i = 0; i < order.size(); ++i) samples.push_back(order(i));
  return samples;
}

bool is_permutation_of_indices(Samples samples, std::int64_t size) {
  Samples indices(static_cast<std::size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  std::sort(samples.begin(), samples.end());
  return samples == indices;
}

/// Runs steps of all ranks from `position` until the end or `stop` steps; appends the real samples, gives the position.
std::int64_t run(std::int64_t position, const Order& order, std::int64_t batch, int world, std::int64_t stop,
                 Samples& seen) {
  const auto steps = std::min(stop, num_steps(position, order.size(), batch, false));
  for (std::int64_t s = 0; s < steps; ++s) {
    std::int64_t taken = 0;
    for (int rank = 0; rank < world; ++rank) {
      const auto step = step_at(position, order.size(), batch, world, rank);
      const auto samples = samples_of(step, order);
      EXPECT_EQ(samples.size(), static_cast<std::size_t>(std::max<std::int64_t>(1, step.mine.count)));
      EXPECT_LE(step.mine.count, (batch + world - 1) / world);
      if (step.mine.count > 0) seen.insert(seen.end(), samples.begin(), samples.end());
      taken += step.mine.count;
    }
    EXPECT_EQ(taken, step_at(position, order.size(), batch, world, 0).samples);
    position += taken;
  }
  return position;
}

TEST(Share, DividesEvenlyTheFirstOnesMore) {
  for (std::int64_t count = 0; count < 20; ++count)
    for (int world = 1; world < 8; ++world) {
      std::int64_t next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const auto share = share_of(count, world, rank);
        EXPECT_EQ(share.first, next);
        EXPECT_EQ(share.count, count / world + (rank < count % world ? 1 : 0));
        next += share.count;
      }
      EXPECT_EQ(next, count);
    }
}

TEST(Permutation, HitsEveryIndexOnce) {
  for (std::int64_t size = 1; size < 200; ++size)
    for (std::uint64_t key = 0; key < 5; ++key) {
      const Permutation permutation(size, key);
      Samples samples;
      for (std::int64_t i = 0; i < size; ++i) samples.push_back(permutation(i));
      ASSERT_TRUE(is_permutation_of_indices(samples, size)) << size << " " << key;
    }
  const std::int64_t large = std::int64_t{1} << 40;
  std::set<std::int64_t> values;
  const Permutation permutation(large, 1);
  for (std::int64_t i = 0; i < 10000; ++i) values.insert(permutation(i));
  EXPECT_EQ(values.size(), 10000u);
  EXPECT_GT(*values.rbegin(), large / 2);
  EXPECT_LT(*values.rbegin(), large);
}

// Pins the numbers: a run is continued on another machine by another build.
TEST(Permutation, IsTheSameOnEveryMachine) {
  const Permutation permutation(1000, 42);
  EXPECT_EQ((Samples{permutation(0), permutation(1), permutation(2), permutation(999)}), (Samples{466, 108, 350, 498}));
}

// Chi-square of (index → value) over keys, each of size² cells expected `keys / size` times. The statistic has
// (size − 1)² degrees of freedom; the bound is its mean and six deviations.
TEST(Permutation, IsUniformOverKeys) {
  for (const std::int64_t size : {2, 3, 4, 7, 10, 33, 64}) {
    const std::int64_t keys = 2000 * size;
    std::vector<std::int64_t> hits(static_cast<std::size_t>(size * size));
    for (std::int64_t key = 0; key < keys; ++key) {
      const Permutation permutation(size, static_cast<std::uint64_t>(key));
      for (std::int64_t i = 0; i < size; ++i) ++hits[static_cast<std::size_t>(i * size + permutation(i))];
    }
    const double expected = static_cast<double>(keys) / static_cast<double>(size);
    double chi = 0;
    for (const auto hit : hits)
      chi += (static_cast<double>(hit) - expected) * (static_cast<double>(hit) - expected) / expected;
    const double freedom = static_cast<double>((size - 1) * (size - 1));
    EXPECT_LT(chi, freedom + 6 * std::sqrt(2 * freedom)) << size;
  }
}

// All 24 orders of four items occur about equally often.
TEST(Permutation, ReachesEveryOrder) {
  std::array<int, 256> hits{};
  constexpr int keys = 24000;
  for (int key = 0; key < keys; ++key) {
    const Permutation p(4, static_cast<std::uint64_t>(key));
    ++hits[static_cast<std::size_t>(p(0) * 64 + p(1) * 16 + p(2) * 4 + p(3))];
  }
  EXPECT_EQ(std::count_if(hits.begin(), hits.end(), [](int n) { return n > 0; }), 24);
  EXPECT_LT(*std::max_element(hits.begin(), hits.end()), 1200);
}

TEST(Permutation, LeavesNeighboursApart) {
  constexpr std::int64_t size = 10007;
  const Permutation permutation(size, 3);
  int close = 0, fixed = 0, rising = 0;
  for (std::int64_t i = 0; i + 1 < size; ++i) {
    close += std::abs(permutation(i) - permutation(i + 1)) < size / 100 ? 1 : 0;
    rising += permutation(i) < permutation(i + 1) ? 1 : 0;
    fixed += permutation(i) == i ? 1 : 0;
  }
  EXPECT_NEAR(close, 2 * size / 100, 60);
  EXPECT_NEAR(rising, size / 2, 250);
  EXPECT_LT(fixed, 10);
}

TEST(Order, DiffersBySeedEpochAndPass) {
  std::set<Samples> orders;
  for (std::uint64_t seed = 0; seed < 3; ++seed)
    for (std::int64_t epoch = 0; epoch < 3; ++epoch)
      for (std::int64_t pass = 0; pass < 3; ++pass)
        orders.insert(all_of(Order(50, {.shuffle = true, .seed = seed, .epoch = epoch, .pass = pass})));
  EXPECT_EQ(orders.size(), 27u);
  EXPECT_EQ(all_of(Order(4, {})), (Samples{0, 1, 2, 3}));
}

TEST(Order, WindowsShuffleWithinThemselves) {
  for (const std::int64_t size : {1, 9, 10, 11, 95}) {
    const Order order(size, {.window = 10, .window_seed = 7});
    const auto samples = all_of(order);
    EXPECT_TRUE(is_permutation_of_indices(samples, size));
    for (std::int64_t i = 0; i < size; ++i) EXPECT_EQ(samples[static_cast<std::size_t>(i)] / 10, i / 10);
  }
  const auto samples = all_of(Order(20, {.window = 10}));
  Samples second;
  for (std::size_t i = 10; i < 20; ++i) second.push_back(samples[i] - 10);
  EXPECT_NE(Samples(samples.begin(), samples.begin() + 10), second) << "each window has a permutation of its own";
  EXPECT_TRUE(is_permutation_of_indices(all_of(Order(35, {.shuffle = true, .window = 10})), 35));
}

TEST(Steps, EverySampleOnceAtAnySize) {
  for (std::int64_t size = 1; size <= 13; ++size)
    for (int world = 1; world <= 5; ++world)
      for (std::int64_t batch = 1; batch <= 16; ++batch) {
        const Order order(size, {.shuffle = true, .seed = 5});
        Samples seen;
        EXPECT_EQ(run(0, order, batch, world, size, seen), size);
        ASSERT_TRUE(is_permutation_of_indices(seen, size)) << size << " " << world << " " << batch;
      }
}

TEST(Steps, GoOnAtAnotherWorldAndBatch) {
  for (const std::int64_t size : {1, 5, 12, 13})
    for (int world = 1; world <= 4; ++world)
      for (std::int64_t batch = 1; batch <= 9; ++batch)
        for (std::int64_t stop = 0; stop <= num_steps(0, size, batch, false); ++stop)
          for (int other_world = 1; other_world <= 4; ++other_world)
            for (const std::int64_t other_batch : {1, 3, 4, 20}) {
              const Order order(size, {.shuffle = true, .window = 4, .seed = 1});
              Samples seen;
              const auto position = run(0, order, batch, world, stop, seen);
              EXPECT_EQ(position, std::min(size, stop * batch));
              EXPECT_EQ(run(position, order, other_batch, other_world, size, seen), size);
              ASSERT_TRUE(is_permutation_of_indices(seen, size));
            }
}

// What makes a change of size invisible: the union of a step's samples depends on the global batch alone.
TEST(Steps, TakeTheSameSamplesAtAnyWorld) {
  const Order order(23, {.shuffle = true});
  Samples alone;
  run(0, order, 6, 1, 100, alone);
  for (int world = 2; world <= 7; ++world) {
    Samples seen;
    run(0, order, 6, world, 100, seen);
    EXPECT_EQ(seen, alone) << world;
  }
}

TEST(Steps, DropTheLast) {
  EXPECT_EQ(num_steps(0, 10, 4, true), 2);
  EXPECT_EQ(num_steps(0, 10, 4, false), 3);
  EXPECT_EQ(num_steps(8, 10, 4, true), 0);
  EXPECT_EQ(num_steps(10, 10, 4, false), 0);
  EXPECT_EQ(num_steps(0, 3, 4, true), 0);
}

TEST(Steps, ARankLeftEmptyReadsTheFirstSampleOfTheStep) {
  const Order order(9, {.shuffle = true});
  const auto step = step_at(8, 9, 4, 4, 3);
  EXPECT_EQ(step.samples, 1);
  EXPECT_EQ(step.mine.count, 0);
  EXPECT_EQ(samples_of(step, order), Samples{order(8)});
}

}  // namespace
}  // namespace muster::detail::data::samples_test
