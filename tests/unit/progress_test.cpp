// The progress threads inside ranks, with what they drive, for the thread sanitizer: ranks are threads too.
#include "gradients/progress_thread.hpp"
#include "node/bucket_reduction.hpp"
#include "unit/node_threads.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

using muster::detail::gradients::ProgressThread;
using muster::detail::node::BucketReduction;
using muster::detail::node::Dtype;
using muster::detail::node::NodeCommunicator;
using muster::detail::node::Region;
using muster::test::on_ranks;

constexpr int rounds = 30;

TEST(ProgressThread, AveragesBesideARankThatAnnounces) {
  const std::vector<BucketReduction::Bucket> buckets{{70'000, Dtype::f64}, {5, Dtype::f64}, {40'001, Dtype::f64}};
  constexpr std::size_t elements = 110'016;
  const auto value = [](int rank, std::size_t i, int round) {
    return static_cast<double>(i % 13) * (rank + 1) + round;
  };
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto control = muster::test::shared_bytes(BucketReduction::memory_bytes(ranks, buckets.size(), 1));
    on_ranks(ranks, elements * sizeof(double), [&](NodeCommunicator& local, const Region& region) {
      BucketReduction reduction(control.get(), region, local.rank(), ranks, buckets, 1);
      const auto average = muster::detail::node::in_place_sum(buckets, 1.0 / ranks);
      ProgressThread thread([&reduction, own = average] { return reduction.process_chunk(own); });
      for (int round = 0; round < rounds; ++round) {
        // As an exchange does in backward().
        reduction.begin();
        reduction.write_word(0, static_cast<std::uint32_t>(round + local.rank()));
        thread.start();
        auto* data = reinterpret_cast<double*>(region.of(local.rank()));
        std::vector<double*> at;
        for (const auto& bucket : buckets) {
          for (std::size_t i = 0; i < bucket.count; ++i) data[i] = value(local.rank(), i, round);
          at.push_back(data);
          reduction.announce(data);
          data += bucket.count;
        }
        thread.stop();
        muster::test::wait_for([&] { return reduction.advance(average); });
        for (int r = 0; r < ranks; ++r) ASSERT_EQ(reduction.word(r, 0), static_cast<std::uint32_t>(round + r));
        for (std::size_t b = 0; b < buckets.size(); ++b)
          for (std::size_t i = 0; i < buckets[b].count; i += b == 1 ? 1 : 997) {
            double sum = 0;
            for (int r = 0; r < ranks; ++r) sum += value(r, i, round);
            ASSERT_EQ(at[b][i], sum * (1.0 / ranks)) << "bucket " << b << ", element " << i;
          }
      }
    });
  }
}

TEST(ProgressThread, IsLeftInTheMiddle) {
  // A pass that ended by an exception and is not continued.
  for (int round = 0; round < rounds; ++round) {
    int begun = 0, ended = 0;
    {
      ProgressThread thread([&] {
        ++begun;
        std::this_thread::yield();
        return ++ended % 2 == 0;
      });
      thread.start();
      thread.stop();
      EXPECT_EQ(begun, ended) << "called after stop()";
      thread.start();
    }
    EXPECT_EQ(begun, ended) << "called after its end";
  }
}

}  // namespace
