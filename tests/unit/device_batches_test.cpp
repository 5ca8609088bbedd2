// Batches on a device whose streams work as late, or as early, as they may.
#include "muster/error.hpp"
#include "support/late_device.hpp"
#include "unit/pass_world.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>
#include <vector>

namespace muster::detail::data::device_batches_test {
namespace {

using namespace pass_world;
using test::late_device::Pool, test::late_device::counts, test::late_device::set_pool;

struct DeviceBatches : testing::TestWithParam<Pool> {
  DeviceBatches() {
    test::late_device::install();
    set_pool(GetParam());
  }
};

constexpr std::int64_t rows = 41;

/// Columns of several types and layouts, each row different.
Dataset columns() {
  const auto y = at::arange(rows);
  const auto images = at::arange(rows * 2 * 3 * 5).remainder(251).to(at::kByte).view({rows, 2, 3, 5});
  return Dataset::from_tensors({{"y", y},
                                {"x", at::arange(2 * rows, at::kDouble).view({rows, 2}) / 7},
                                {"image", images},
                                {"flag", y.remainder(3).eq(0)},
                                {"none", at::empty({rows, 0})}});
}

/// Makes the images channels-last, and adds a column that is not dense.
Dataset in_other_layouts(const Dataset& data, int threads) {
  return data.map_batches(
      [](Batch& batch) {
        batch.set("image", batch["image"].contiguous(at::MemoryFormat::ChannelsLast));
        batch.set("wide", batch["x"].narrow(1, 0, 1).expand({-1, 4}));
      },
      {.threads = threads});
}

BatchOptions options_of(int prefetch) {
  return {.batch_size = 4,
          .shuffle = true,
          .prefetch_batches = prefetch,
          .dtypes = {{"x", at::kFloat}, {"image", at::kFloat}}};
}

std::vector<Batch> batches_of(const Dataset& data, BatchOptions options, bool on_device) {
  if (on_device) options.device = test::late_device::device();
  std::vector<Batch> batches;
  for (auto& batch : World(data, 1).shard().iter_batches(options)) batches.push_back(std::move(batch));
  return batches;
}

void expect_same(const Batch& on_device, const Batch& expected) {
  ASSERT_EQ(on_device.size(), expected.size());
  EXPECT_EQ(on_device.global_size(), expected.global_size());
  ASSERT_EQ(on_device.num_columns(), expected.num_columns());
  for (const auto& [name, tensor] : expected) {
    EXPECT_EQ(on_device[name].device(), test::late_device::device());
    EXPECT_EQ(on_device[name].scalar_type(), tensor.scalar_type());
    if (tensor.is_non_overlapping_and_dense()) {
      EXPECT_EQ(on_device[name].strides(), tensor.strides()) << name;
    }
    EXPECT_TRUE(at::equal(on_device[name].cpu(), tensor)) << name;
  }
}

TEST_P(DeviceBatches, HaveTheValuesOfTheHost) {
  for (const int threads : {1, 3})
    for (const int prefetch : {0, 1, 3, 20}) {
      const auto data = in_other_layouts(columns(), threads);
      const auto expected = batches_of(data, options_of(prefetch), false);
      const auto before = counts();
      const auto batches = batches_of(data, options_of(prefetch), true);
      EXPECT_EQ(counts().copies_from_pageable, before.copies_from_pageable);
      ASSERT_EQ(batches.size(), expected.size());
      // Not before all have been taken: so copies may be late.
      for (std::size_t i = 0; i < batches.size(); ++i) expect_same(batches[i], expected[i]);
    }
}

TEST_P(DeviceBatches, AreThereForTheStreamThatTakesThem) {
  for (const int prefetch : {0, 1, 3}) {
    const auto expected = batches_of(columns(), options_of(prefetch), false);
    auto options = options_of(prefetch);
    options.device = test::late_device::device();
    auto next = expected.begin();
    for (auto& batch : World(columns(), 1).shard().iter_batches(options)) expect_same(batch, *next++);
    EXPECT_EQ(next, expected.end());
  }
}

TEST_P(DeviceBatches, AreTakenWithoutAWaitOfTheThread) {
  auto options = options_of(2);
  options.device = test::late_device::device();
  const World world(columns(), 1);
  const auto before = counts();
  std::int64_t batches = 0;
  {
    auto range = world.shard().iter_batches(options);
    for ([[maybe_unused]] auto& batch : range) {
      ++batches;
      EXPECT_EQ(counts().waits_of_this_thread, before.waits_of_this_thread);
    }
  }
  EXPECT_EQ(counts().stream_waits - before.stream_waits, batches);
  EXPECT_EQ(counts().records - before.records, 5 * batches);
}

TEST_P(DeviceBatches, AreNotOverwrittenWhileTheDeviceUsesThem) {
  const auto expected = batches_of(columns(), options_of(1), false);
  auto options = options_of(1);
  options.device = test::late_device::device();
  std::vector<Batch> used;
  // The device's own copies are late: they are done after the batches are gone.
  for (auto& batch : World(columns(), 1).shard().iter_batches(options)) {
    std::vector<Batch::Item> items;
    for (const auto& [name, tensor] : batch) items.emplace_back(name, tensor.clone());
    used.emplace_back(std::move(items), batch.size(), batch.global_size());
    batch = {};
  }
  ASSERT_EQ(used.size(), expected.size());
  for (std::size_t i = 0; i < used.size(); ++i) expect_same(used[i], expected[i]);
}

TEST_P(DeviceBatches, UseTheirPinnedMemoryAgain) {
  const auto before = counts();
  const auto large = Dataset::from_tensors({{"y", at::arange(4000)}});
  auto options = options_of(1);
  options.dtypes = {};
  const auto batches = batches_of(large, options, true);
  ASSERT_EQ(batches.size(), 1000u);
  EXPECT_LE(counts().pinned_pieces - before.pinned_pieces, 9);
  EXPECT_EQ(counts().pinned_in_use, before.pinned_in_use);
  EXPECT_EQ(counts().lost_copies, before.lost_copies);
  Samples samples;
  for (const auto& batch : batches) append(samples, Batch({{"y", batch["y"].cpu()}}, batch.size()));
  EXPECT_EQ(sorted(samples), indices(4000));
}

TEST_P(DeviceBatches, OfDifferentSizesFitIntoPinnedMemory) {
  // Each batch is larger than the one before.
  const auto data = numbers(40).map_batches([](Batch& batch) {
    const auto first = batch["y"][0].item<std::int64_t>();
    batch.set("long", batch["y"].unsqueeze(1).expand({-1, 1 + 100 * first}).contiguous());
  });
  const BatchOptions options{.batch_size = 3};
  const auto expected = batches_of(data, options, false), batches = batches_of(data, options, true);
  ASSERT_EQ(batches.size(), expected.size());
  for (std::size_t i = 0; i < batches.size(); ++i) expect_same(batches[i], expected[i]);
}

TEST_P(DeviceBatches, OutliveAPassThatIsLeft) {
  const auto expected = batches_of(columns(), options_of(3), false);
  auto options = options_of(3);
  options.device = test::late_device::device();
  const auto before = counts();
  Batch kept;
  {
    auto range = World(columns(), 1).shard().iter_batches(options);
    auto batch = range.begin();
    ++batch;
    kept = *batch;
  }
  expect_same(kept, expected[1]);
  EXPECT_EQ(counts().lost_copies, before.lost_copies);
  EXPECT_EQ(counts().pinned_in_use, before.pinned_in_use);
}

TEST_P(DeviceBatches, BelongToTheStreamThatTakesThem) {
  const c10::impl::VirtualGuardImpl device(test::late_device::device().type());
  const auto other = device.getStreamFromGlobalPool(test::late_device::device());
  const auto expected = batches_of(columns(), options_of(1), false);
  const c10::StreamGuard guard(other);
  const auto batches = batches_of(columns(), options_of(1), true);
  for (std::size_t i = 0; i < batches.size(); ++i) expect_same(batches[i], expected[i]);
}

TEST_P(DeviceBatches, ComeUpToTheOneThatFails) {
  for (const int prefetch : {0, 2}) {
    int calls = 0;  // the first one is for the schema
    const auto data = columns().map_batches([&](Batch&) {
      if (++calls == 5) throw std::runtime_error("the fourth batch");
    });
    auto options = options_of(prefetch);
    const auto expected = batches_of(columns(), options, false);
    options.device = test::late_device::device();
    const auto before = counts();
    std::vector<Batch> batches;
    EXPECT_THROW(
        {
          for (auto& batch : World(data, 1).shard().iter_batches(options)) batches.push_back(std::move(batch));
        },
        std::runtime_error);
    ASSERT_EQ(batches.size(), 3u);
    for (std::size_t i = 0; i < batches.size(); ++i) expect_same(batches[i], expected[i]);
    EXPECT_EQ(counts().lost_copies, before.lost_copies);
  }
}

TEST_P(DeviceBatches, OfAColumnThatCannotBeCopiedLoseNoOther) {
  // A sparse column cannot go to this device. The columns before it are under way by then.
  const auto data = columns().map_batches([](Batch& batch) { batch.set("sparse", batch["x"].to_sparse()); });
  const auto before = counts();
  EXPECT_ANY_THROW(batches_of(data, options_of(2), true));
  test::late_device::finish();
  EXPECT_EQ(counts().lost_copies, before.lost_copies);
  EXPECT_EQ(counts().pinned_in_use, before.pinned_in_use);
}

TEST_P(DeviceBatches, OfEachRankOfAnUnevenStep) {
  for (const int ranks : {2, 3}) {
    BatchOptions options{.global_batch_size = 7};
    const World world(numbers(8), ranks), other(numbers(8), ranks);
    for (std::size_t rank = 0; rank < world.states.size(); ++rank) {
      std::vector<Batch> expected, batches;
      options.device = {};
      for (auto& batch : world.shard(rank).iter_batches(options)) expected.push_back(std::move(batch));
      options.device = test::late_device::device();
      for (auto& batch : other.shard(rank).iter_batches(options)) batches.push_back(std::move(batch));
      ASSERT_EQ(batches.size(), expected.size());
      for (std::size_t i = 0; i < batches.size(); ++i) {
        expect_same(batches[i], expected[i]);
        EXPECT_EQ(batches[i].weight(), expected[i].weight());
      }
    }
  }
}

TEST_P(DeviceBatches, OfAStreamAreCopiedAheadToo) {
  const auto rows_of = [](const StreamShard&) -> StreamReader {
    auto next = std::make_shared<std::int64_t>(0);
    return [next]() -> std::optional<StreamRows> {
      if (*next == 10) return {};
      return StreamRows(Json{{"y", (*next)++}});
    };
  };
  const auto stream = Dataset::from_stream(rows_of);
  const auto state =
      std::make_shared<ShardState>(PassPositionOptions{.name = "stream", .resumable = false, .stream = true}, stream);
  const auto positions = std::make_shared<PassPositions>();
  positions->add(state);
  BatchOptions options{.batch_size = 3, .dtypes = {{"y", at::kInt}}, .device = test::late_device::device()};
  Samples samples;
  std::vector<Batch> batches;
  for (auto& batch : DatasetShard(state).iter_batches(options)) batches.push_back(std::move(batch));
  for (const auto& batch : batches) {
    EXPECT_EQ(batch["y"].scalar_type(), at::kInt);
    append(samples, Batch({{"y", batch["y"].cpu()}}, batch.size()));
  }
  EXPECT_EQ(samples, indices(10));
  options.dtypes = {{"z", at::kInt}};
  EXPECT_THROW(DatasetShard(state).iter_batches(options).begin(), Error);
}

INSTANTIATE_TEST_SUITE_P(Streams, DeviceBatches, testing::Values(Pool::late, Pool::early),
                         [](const auto& test) { return test.param == Pool::late ? "late" : "early"; });

}  // namespace
}  // namespace muster::detail::data::device_batches_test
