// Blocks that are prepared while batches are read.
#include "data/passes/blocks_ahead.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace muster::detail::data {
namespace {

using Samples = std::vector<std::int64_t>;

/// The samples of all calls.
class Prepared {
 public:
  void add(const Samples& samples) {
    const std::lock_guard lock(mutex_);
    for (const auto sample : samples) EXPECT_TRUE(samples_.insert(sample).second) << sample << " came twice";
  }
  bool contains(std::int64_t sample) {
    const std::lock_guard lock(mutex_);
    return samples_.contains(sample);
  }
  std::size_t size() {
    const std::lock_guard lock(mutex_);
    return samples_.size();
  }

 private:
  std::mutex mutex_;
  std::set<std::int64_t> samples_;
};

ExpectedBlock block(std::int64_t sample, int lane, std::int64_t first) { return {sample, lane, first}; }

TEST(BlocksAhead, AreThereWhenTheirRowsAreRead) {
  for (const bool uses_threads : {true, false}) {
    std::mt19937 random(3);
    Prepared prepared;
    BlocksAhead ahead([&](const Samples& samples) { prepared.add(samples); }, uses_threads);
    constexpr int lanes = 8, rows = 4;
    for (std::int64_t round = 0; round < 500; ++round) {
      // Each lane comes to the block `round` + 1, of which `sample` tells the lane and the number.
      std::vector<ExpectedBlock> blocks;
      for (int lane = 0; lane < lanes; ++lane)
        blocks.push_back(block((round + 1) * lanes + lane, lane, (round + 1) * rows));
      std::ranges::shuffle(blocks, random);
      const auto part = blocks.begin() + static_cast<std::ptrdiff_t>(random() % blocks.size());
      ahead.add({blocks.begin(), part});
      ahead.add({part, blocks.end()});
      const int lane = static_cast<int>(random() % lanes);
      const LaneRange read{lane, (round + 1) * rows - 1, (round + 1) * rows + 1};
      ahead.wait_for({&read, 1});
      EXPECT_TRUE(prepared.contains((round + 1) * lanes + lane));
    }
    for (int lane = 0; lane < lanes; ++lane) {
      const LaneRange all{lane, 0, 501 * rows};
      ahead.wait_for({&all, 1});
    }
    EXPECT_EQ(prepared.size(), 500U * lanes);
  }
}

TEST(BlocksAhead, ThatComeLaterAreNotWaitedForAndArePreparedBesideTheOthers) {
  std::latch has_begun(1), may_end(1);
  std::atomic<bool> ended = false;
  BlocksAhead ahead(
      [&](const Samples& samples) {
        if (samples.front() != 1) return may_end.count_down();
        has_begun.count_down();
        may_end.wait();
        ended = true;
      },
      true);
  ahead.add(std::vector{block(1, 0, 10), block(2, 1, 10)});
  ahead.add({});
  has_begun.wait();
  const std::vector<LaneRange> before{{0, 8, 10}, {1, 9, 10}, {2, 0, 100}};
  ahead.wait_for(before);
  EXPECT_FALSE(ended);
  ahead.add(std::vector{block(3, 3, 0)});
  const LaneRange first{0, 9, 11};
  ahead.wait_for({&first, 1});
  EXPECT_TRUE(ended);
}

TEST(BlocksAhead, ThatCannotBePreparedAreLeftToTheBatch) {
  for (const bool uses_threads : {true, false}) {
    std::atomic<int> calls = 0;
    BlocksAhead ahead(
        [&](const Samples&) {
          if (++calls % 2 == 1) throw std::runtime_error("the disk failed");
          throw 5;
        },
        uses_threads);
    for (std::int64_t i = 0; i < 10; ++i) {
      ahead.add(std::vector{block(i, 0, i)});
      const LaneRange rows{0, i, i + 1};
      ahead.wait_for({&rows, 1});
    }
    EXPECT_EQ(calls, 10);
  }
}

TEST(BlocksAhead, LeftEarlyWaitsForTheCallsUnderWayAndDropsTheRest) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> running = 0, calls = 0;
    {
      BlocksAhead ahead(
          [&](const Samples&) {
            ++running;
            ++calls;
            --running;
          },
          true);
      for (std::int64_t i = 0; i < round % 7; ++i) ahead.add(std::vector{block(i, 0, i)});
    }
    EXPECT_EQ(running, 0);
    EXPECT_LE(calls, round % 7);
  }
}

}  // namespace
}  // namespace muster::detail::data
