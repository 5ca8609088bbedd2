#include "data/passes/lanes.hpp"

#include "data/passes/samples.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace muster::detail::data::lanes_test {
namespace {

using Rows = std::vector<std::int64_t>;

std::int64_t total(const Rows& counts) { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }

Rows all_of(const Lanes& lanes) {
  Rows rows;
  for (std::int64_t position = 0; position < lanes.size(); ++position) rows.push_back(lanes.row_at(position));
  return rows;
}

bool is_permutation_of_indices(Rows rows) {
  std::ranges::sort(rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i] != static_cast<std::int64_t>(i)) return false;
  return true;
}

Blocks draw_blocks(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t bound) { return static_cast<std::int64_t>(random() % bound); };
  Blocks blocks{.rows = 1 + below(below(3) == 0 ? 100 : 9), .lanes = static_cast<int>(1 + below(70))};
  const auto files = 1 + below(4);
  for (std::int64_t i = 0; i < files; ++i) blocks.files.push_back(1 + below(below(2) == 0 ? 20 : 2000));
  return blocks;
}

OrderOptions shuffled(const Blocks& blocks, std::uint64_t seed) {
  return {.shuffle = true, .blocks = blocks, .seed = seed};
}

TEST(Lanes, TakeEachRowOnceInEveryShape) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    const auto blocks = draw_blocks(random);
    const Lanes lanes(blocks, random());
    ASSERT_EQ(lanes.size(), total(blocks.files));
    ASSERT_TRUE(is_permutation_of_indices(all_of(lanes))) << "case " << i;
  }
}

TEST(Lanes, TakenAgreesWithThePositions) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    const Lanes lanes(draw_blocks(random), random());
    Rows taken(static_cast<std::size_t>(lanes.count()));
    for (std::int64_t position = 0; position < lanes.size(); ++position) {
      ASSERT_EQ(lanes.taken(position), taken);
      // Exactly one lane gives the next row.
      const auto after = lanes.taken(position + 1);
      int changed = -1;
      for (int lane = 0; lane < lanes.count(); ++lane) {
        const auto at = static_cast<std::size_t>(lane);
        if (after[at] == taken[at]) continue;
        ASSERT_EQ(changed, -1);
        ASSERT_EQ(after[at], taken[at] + 1);
        changed = lane;
      }
      ASSERT_GE(changed, 0);
      ASSERT_EQ(lanes.row_at(position), lanes.row(changed, taken[static_cast<std::size_t>(changed)]));
      taken = after;
    }
    for (int lane = 0; lane < lanes.count(); ++lane)
      ASSERT_EQ(taken[static_cast<std::size_t>(lane)], lanes.length(lane));
  }
}

TEST(Lanes, StepsAndResumesRepeatAndLoseNothing) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; ++i) {
    const auto blocks = draw_blocks(random);
    const Order order(total(blocks.files), shuffled(blocks, random()));
    Rows seen;
    for (std::int64_t position = 0; position < order.size();) {  // each step on other ranks, as after a resume
      const int world = static_cast<int>(1 + random() % 9);
      const auto batch = static_cast<std::int64_t>(1 + random() % 200);
      Rows got, expected;
      for (int rank = 0; rank < world; ++rank) {
        const auto step = step_at(position, order.size(), batch, world, rank);
        const auto samples = samples_of(step, order);
        if (step.mine.count > 0) got.insert(got.end(), samples.begin(), samples.end());
      }
      for (std::size_t at = 0; at < got.size(); ++at)
        expected.push_back(order(position + static_cast<std::int64_t>(at)));
      position += std::ssize(got);
      std::ranges::sort(expected);
      std::ranges::sort(got);
      ASSERT_EQ(got, expected);
      seen.insert(seen.end(), got.begin(), got.end());
    }
    ASSERT_TRUE(is_permutation_of_indices(seen));
  }
}

TEST(Lanes, AStepIsTheSameAtAnyNumberOfRanks) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 300; ++i) {
    const auto blocks = draw_blocks(random);
    const Order order(total(blocks.files), shuffled(blocks, random()));
    const auto batch = static_cast<std::int64_t>(1 + random() % 100);
    const auto at = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(order.size()));
    Rows one;
    for (const int world : {1, 2, 3, 7}) {
      Rows all;
      for (int rank = 0; rank < world; ++rank) {
        const auto step = step_at(at, order.size(), batch, world, rank);
        const auto mine = samples_of(step, order);
        if (step.mine.count > 0) all.insert(all.end(), mine.begin(), mine.end());
      }
      if (world == 1) one = all;
      ASSERT_EQ(all, one);
    }
  }
}

/// How many blocks all ranks read together, if each keeps a block only while it takes its rows.
std::int64_t blocks_read(const Blocks& blocks, int world, std::int64_t batch) {
  const Order order(total(blocks.files), shuffled(blocks, 5));
  std::int64_t read = 0;
  for (int rank = 0; rank < world; ++rank) {
    std::set<std::int64_t> of_rank;
    for (std::int64_t position = 0; position < order.size(); position += batch) {
      const auto step = step_at(position, order.size(), batch, world, rank);
      if (step.mine.count == 0) continue;
      for (const auto row : samples_of(step, order)) of_rank.insert(row / blocks.rows);
    }
    read += static_cast<std::int64_t>(of_rank.size());
  }
  return read;
}

TEST(Lanes, ABlockIsReadByOneRank) {
  const Blocks blocks{.rows = 50, .files = {50 * 64 * 10}};
  for (const int world : {1, 2, 4, 8, 16, 64})
    for (const std::int64_t batch : {64, 128, 640}) EXPECT_EQ(blocks_read(blocks, world, batch), 640) << world;
  // If the number of lanes is not a multiple of the number of ranks, neighbours share a lane.
  EXPECT_LE(blocks_read(blocks, 3, 192), 1.1 * 640);
  EXPECT_LE(blocks_read(blocks, 6, 384), 1.1 * 640);
}

TEST(Lanes, ALaneGivesItsBlocksOneAfterTheOther) {
  const Blocks blocks{.rows = 40, .files = {40 * 500 + 17, 33, 40 * 100 + 1}, .lanes = 16};
  const Lanes lanes(blocks, 7);
  for (int lane = 0; lane < lanes.count(); ++lane) {
    std::set<std::int64_t> left;
    std::int64_t open = -1;
    for (std::int64_t index = 0; index < lanes.length(lane); ++index) {
      const auto row = lanes.row(lane, index);
      if (row >= 40 * 500) continue;  // the ends of files are in blocks of their own
      const auto block = row / 40;
      if (block == open) continue;
      if (open >= 0) left.insert(open);
      open = block;
      EXPECT_FALSE(left.contains(block)) << "a lane has opened a block twice";
    }
  }
}

TEST(Lanes, EachBlockButTheFirstIsReadAheadOnceAndInTime) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 400; ++i) {
    const auto rows = 1 + static_cast<std::int64_t>(random() % 50);
    const Blocks blocks{.rows = rows,
                        .files = {rows * 100 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows))},
                        .lanes = 8};
    const Lanes lanes(blocks, random());
    const std::uint64_t longest = i % 2 == 0 ? 1 : 5;  // several rows at once may skip the turn of a short block
    for (int lane = 0; lane < lanes.count(); ++lane) {
      std::set<std::int64_t> ahead, opened;
      for (std::int64_t first = 0, last = 0; first < lanes.length(lane); first = last) {
        last = std::min(lanes.length(lane), first + 1 + static_cast<std::int64_t>(random() % longest));
        if (const auto next = lanes.block_to_read_ahead(lane, first, last)) {
          EXPECT_TRUE(ahead.insert(next->row / rows).second);
          EXPECT_FALSE(opened.contains(next->row / rows));
          EXPECT_EQ(lanes.row(lane, next->first) / rows, next->row / rows);
          EXPECT_NE(lanes.row(lane, next->first - 1) / rows, next->row / rows);
          // The last block may be shorter.
          const auto is_long = rows > 1 && next->first % rows == 0;
          EXPECT_TRUE(!is_long || longest > 1 || first + 1 < next->first) << "no row is left while it is decoded";
        }
        for (auto index = first; index < last; ++index) {
          const auto block = lanes.row(lane, index) / rows;
          const bool is_next = opened.insert(block).second && opened.size() > 1;
          EXPECT_TRUE(!is_next || longest > 1 || ahead.contains(block)) << "opened before it was read ahead";
        }
      }
      EXPECT_TRUE(longest > 1 || ahead.size() + 1 == opened.size());
    }
  }
}

TEST(Lanes, ABlockIsRequestedByTheRankThatDecodesItAndEarlier) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 60; ++i) {
    const auto rows = 8 + static_cast<std::int64_t>(random() % 40);
    const Blocks blocks{.rows = rows, .files = {rows * 60}, .lanes = 8};
    const Order order(rows * 60, shuffled(blocks, random()));
    const int world = 1 + i % 3;
    const auto global_batch = static_cast<std::int64_t>(8 + random() % 9);
    std::set<std::int64_t> requested, decoded;
    for (std::int64_t position = 0; position < rows * 60; position += global_batch)
      for (int rank = 0; rank < world; ++rank) {
        const auto step = step_at(position, rows * 60, global_batch, world, rank);
        const auto taken = lanes_of(step, *order.lanes());
        for (const auto& block : blocks_to_expect(taken, *order.lanes(), Ahead::request)) {
          EXPECT_FALSE(decoded.contains(block.sample / rows)) << "requested after it was decoded";
          requested.insert(block.sample / rows);
        }
        for (const auto& block : blocks_to_expect(taken, *order.lanes(), Ahead::decode))
          decoded.insert(block.sample / rows);
      }
    // Those whose turn comes in the first quarter of a lane's first block are not requested.
    EXPECT_GE(requested.size() + 2, decoded.size() * 3 / 4) << decoded.size();
    EXPECT_TRUE(std::ranges::includes(decoded, requested));
    EXPECT_GT(decoded.size(), 40u);
  }
}

/// The mean length of runs of one label, over positions, in a file that is sorted by its label.
template <class RowAt>
double mean_run(std::int64_t size, int labels, const RowAt& row_at) {
  std::int64_t runs = 0, before = -1;
  for (std::int64_t position = 0; position < size; ++position) {
    const auto label = row_at(position) * labels / size;
    runs += label != std::exchange(before, label) ? 1 : 0;
  }
  return static_cast<double>(size) / static_cast<double>(runs);
}

TEST(Lanes, LabelsOfASortedFileComeInRunsAsShortAsThoseOfAFullShuffle) {
  constexpr std::int64_t size = 200'000;
  for (const std::int64_t rows : {1, 10, 100, 500})
    for (const int labels : {2, 10, 100}) {
      double of_lanes = 0, full = 0;
      for (const std::uint64_t seed : {1, 2, 3, 4}) {
        const Lanes lanes({.rows = rows, .files = {size}}, seed);
        const Permutation permutation(size, seed);
        // By lanes in turn, which is faster than row_at().
        Rows next(static_cast<std::size_t>(lanes.count())), order;
        while (std::ssize(order) < size)
          for (int lane = 0; lane < lanes.count(); ++lane)
            if (auto& index = next[static_cast<std::size_t>(lane)]; index < lanes.length(lane))
              order.push_back(lanes.row(lane, index++));
        of_lanes += mean_run(size, labels, [&](std::int64_t at) { return order[static_cast<std::size_t>(at)]; });
        full += mean_run(size, labels, permutation);
      }
      EXPECT_NEAR(of_lanes / full, 1, 0.05) << rows << " rows in a block, " << labels << " labels";
    }
}

TEST(Lanes, PositionsAndRowsAreNotCorrelated) {
  constexpr std::int64_t size = 64'000;
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    const Lanes lanes({.rows = 100, .files = {size}}, seed);
    double sum = 0;
    const double mean = (size - 1) / 2.0, variance = (static_cast<double>(size) * size - 1) / 12.0;
    for (std::int64_t at = 0; at < size; ++at)
      sum += (static_cast<double>(at) - mean) * (static_cast<double>(lanes.row_at(at)) - mean);
    // Among 640 blocks in random order, the correlation's standard deviation is 1/√640.
    EXPECT_LT(std::abs(sum / size / variance), 4 / std::sqrt(640.0));
  }
}

TEST(Lanes, AnotherEpochHasAnotherOrderAndTheSameOneTheSame) {
  const Blocks blocks{.rows = 10, .files = {1000}};
  auto options = shuffled(blocks, 1);
  const Order first(1000, options), again(1000, options);
  options.epoch = 1;
  const Order second(1000, options);
  int same = 0;
  for (std::int64_t at = 0; at < 1000; ++at) {
    EXPECT_EQ(first(at), again(at));
    same += first(at) == second(at) ? 1 : 0;
  }
  EXPECT_LT(same, 20);
}

}  // namespace
}  // namespace muster::detail::data::lanes_test
