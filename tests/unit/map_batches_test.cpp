#include "data/passes/batches.hpp"
#include "data/preprocess/apply.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"
#include "soak/dice.hpp"
#include "support/folder.hpp"
#include "support/hdf5_fixture.hpp"
#include "unit/pass_world.hpp"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <deque>
#include <functional>
#include <latch>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

namespace muster::detail::data::map_batches_test {
namespace {

using namespace pass_world;

template <class F>
constexpr bool can_be_mapped = std::is_constructible_v<BatchFunction, F>;
static_assert(can_be_mapped<void (*)(Batch&)>);
static_assert(can_be_mapped<void (*)(Batch&, at::Generator&)>);
static_assert(!can_be_mapped<void (*)(Batch)>, "it would change a copy");
static_assert(!can_be_mapped<void (*)(const Batch&)>);
static_assert(!can_be_mapped<Batch (*)(Batch)>, "what it returns would be lost");
static_assert(!can_be_mapped<Batch (*)(Batch&)>);
static_assert(!can_be_mapped<void (*)(Batch, at::Generator&)>);

std::int64_t first_of(const Batch& batch) { return batch["y"][0].item<std::int64_t>(); }

/// A World whose ranks read `dataset`.
World world_of(const Dataset& dataset, int ranks = 1, std::uint64_t seed = 7) {
  return World(dataset, ranks, /*split=*/true, seed);
}

std::string error_of(const std::function<void()>& work, ExitCode code) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

/// A preprocessor that is a function.
class Applied : public Preprocessor {
 public:
  explicit Applied(BatchFunction::WithGenerator function) : function_(std::move(function)) {}
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  using Preprocessor::transform;
  void transform(Batch& batch, at::Generator& generator) const override { function_(batch, generator); }
  Json state() const override { return nullptr; }
  void load_state(const Json&) override {}

 private:
  BatchFunction::WithGenerator function_;
};

/// A preprocessor that draws from torch's own generator.
class Old : public Preprocessor {
 public:
  explicit Old(std::string column) : column_(std::move(column)) {}
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override { batch.set(column_, at::rand({batch["y"].size(0)}, at::kDouble)); }
  Json state() const override { return nullptr; }
  void load_state(const Json&) override {}

 private:
  std::string column_;
};

/// Adds a column of random numbers.
BatchFunction::WithGenerator noise(const std::string& column) {
  return [column](Batch& batch, at::Generator& generator) {
    batch.set(column, at::rand({batch["y"].size(0)}, generator, at::kDouble));
  };
}

/// What each sample got in a pass of every rank, by the sample; no more than `stop` batches of a rank.
using Values = std::map<std::int64_t, std::vector<double>>;
void take_pass(const World& world, const BatchOptions& options, Values& values, std::int64_t stop = 1000,
               Json* position = nullptr) {
  for (const auto& state : world.states) {
    std::int64_t taken = 0;
    for (const auto& batch : DatasetShard(state).iter_batches(options)) {
      for (std::int64_t i = 0; i < batch.size(); ++i) {
        auto& row = values[batch["y"][i].item<std::int64_t>()];
        EXPECT_TRUE(row.empty()) << "a sample comes twice";
        for (const auto& [name, tensor] : batch)
          for (std::int64_t j = 0; j < tensor[i].numel(); ++j) row.push_back(tensor[i].flatten()[j].item<double>());
      }
      if (++taken < stop) continue;
      *position = state->position();
      break;
    }
  }
}
Values values_of(const World& world, const BatchOptions& options) {
  Values values;
  take_pass(world, options, values);
  return values;
}

TEST(MapBatches, AddsReplacesAndReshapesColumns) {
  for (const int threads : {1, 2, 5})
    for (const int ahead : {0, 1, 4}) {
      const auto dataset = numbers(23).map_batches(
          [](Batch& batch) {
            EXPECT_FALSE(at::GradMode::is_enabled());
            batch.set("x", (batch["x"] + 1).unsqueeze(1));
            batch.set("z", batch["y"].to(at::kFloat) / 2);
          },
          {.threads = threads});
      EXPECT_EQ(dataset.schema(), (Schema{{"x", at::kInt, {1, 2}}, {"y", at::kLong, {}}, {"z", at::kFloat, {}}}));
      EXPECT_EQ(dataset.read(Samples{5, 3})["z"][1].item<float>(), 1.5F);
      const auto values =
          values_of(world_of(dataset, 2), {.batch_size = 3, .shuffle = true, .prefetch_batches = ahead});
      EXPECT_EQ(values.size(), 23u);
      for (const auto& [y, row] : values) {
        const auto n = static_cast<double>(y);
        EXPECT_EQ(row, (std::vector<double>{2 * n + 1, 2 * n + 2, n, n / 2}));
      }
    }
}

TEST(MapBatches, BatchesComeInOrderAndOnce) {
  for (const int threads : {1, 2, 3, 8})
    for (const int ahead : {0, 1, 2, 9}) {
      const auto dataset =
          numbers(50).map_batches([](Batch& batch) { batch.set("z", batch["y"] * 1); }, {.threads = threads});
      const World world(dataset, 1);
      EXPECT_EQ(samples_in(world.shard().iter_batches({.batch_size = 3, .prefetch_batches = ahead})), indices(50));
    }
}

TEST(MapBatches, GetTheRandomNumbersOfAPreprocessor) {
  const auto want = values_of(world_of(numbers(64).transform(std::make_shared<Applied>(noise("noise")))),
                              {.batch_size = 4, .shuffle = true});
  EXPECT_EQ(want.size(), 64u);
  for (const int threads : {1, 2, 4})
    for (const int ahead : {0, 1, 3}) {
      const auto world = world_of(numbers(64).map_batches(noise("noise"), {.threads = threads}));
      const BatchOptions options{.batch_size = 4, .shuffle = true, .prefetch_batches = ahead};
      EXPECT_EQ(values_of(world, options), want) << threads << " threads, " << ahead << " ahead";
      EXPECT_NE(values_of(world, options), want) << "another pass has other numbers";
    }
}

TEST(MapBatches, ComposeWithPreprocessorsInOrder) {
  const auto doubled = [](Batch& batch) { batch.set("y2", batch["y"] * 2); };
  const auto increased = [](Batch& batch, at::Generator&) { batch["y2"] += 1; };
  const auto squared = [](Batch& batch) { batch.set("y2", batch["y2"] * batch["y2"]); };
  for (const int threads : {1, 3})
    for (const int ahead : {0, 2}) {
      const auto dataset = numbers(20)
                               .map_batches(doubled, {.threads = threads})
                               .map_batches(noise("a"))
                               .transform(chain({std::make_shared<Applied>(increased),
                                                 std::make_shared<Applied>(noise("b")), std::make_shared<Old>("c")}))
                               .map_batches(squared, {.threads = threads})
                               .map_batches(noise("d"), {.threads = 2});
      const auto world = world_of(dataset);
      const auto order = world.states[0]->plan({.batch_size = 6}, {.count = 20}).order;
      at::manual_seed(1);
      for (const auto& batch : world.shard().iter_batches({.batch_size = 6, .prefetch_batches = ahead})) {
        // One generator goes through all of them.
        auto generator = make_generator(order.random_seed(first_of(batch)));
        const auto rows = batch.size();
        for (const char* column : {"a", "b", "c", "d"})
          EXPECT_TRUE(at::equal(batch[column], at::rand({rows}, generator, at::kDouble))) << column;
        EXPECT_TRUE(at::equal(batch["y2"], (batch["y"] * 2 + 1) * (batch["y"] * 2 + 1)));
      }
      auto own = make_generator(1);
      EXPECT_TRUE(at::equal(at::rand({3}), at::rand({3}, own))) << "the program's own numbers are its own";
    }
}

TEST(MapBatches, OfSubsetsAndSplits) {
  const auto add = [](const char* name) { return [name](Batch& batch) { batch.set(name, batch["y"] + 1); }; };
  for (const int threads : {1, 4}) {
    const auto mapped = numbers(40).map_batches(add("a"), {.threads = threads}).map_batches(noise("n"));
    Samples odd;
    for (std::int64_t i = 1; i < 40; i += 2) odd.push_back(i);
    const auto subset =
        mapped.subset(odd).map_batches(add("b"), {.threads = threads}).transform(std::make_shared<Applied>(noise("m")));
    EXPECT_EQ(source_of(subset)->threads(), threads);
    const auto world = world_of(subset, 2);
    const auto values = values_of(world, {.batch_size = 3});
    const auto again = values_of(world, {.batch_size = 3});
    EXPECT_EQ(values.size(), odd.size());
    for (const auto& [y, row] : values) {  // x of two values, y, a, n, b, m
      EXPECT_EQ(row[3], static_cast<double>(y + 1));
      EXPECT_EQ(row[5], static_cast<double>(y + 1));
      EXPECT_NE(row[4], row[6]) << "the subset's numbers are not those of the dataset again";
      EXPECT_NE(row[4], again.at(y)[4]) << "another pass has other numbers";
    }
    std::set<std::int64_t> seen;
    for (const auto& part : mapped.random_split({0.5, 0.5}, 3))
      for (const auto& [y, row] : values_of(world_of(part), {.batch_size = 3})) {
        EXPECT_EQ(row[3], static_cast<double>(y + 1));
        EXPECT_TRUE(seen.insert(y).second);
      }
    EXPECT_EQ(seen.size(), 40u);
  }
}

TEST(MapBatches, OfWindows) {
  const test::Folder folder;
  test::H5File(folder.file("a.h5")).columns(40);  // y is 0, 1, 2, …
  const auto dataset = Dataset::windows({folder.file("a.h5") + ":/y"}, {.size = {4}, .stride = {2}})
                           .map_batches([](Batch& batch) { batch.set("sum", batch["y"].sum(1)); }, {.threads = 3});
  const World world(dataset, 1);
  std::int64_t windows = 0;
  for (const auto& batch : world.shard().iter_batches({.batch_size = 5, .shuffle = true})) {
    EXPECT_TRUE(at::equal(batch["sum"], batch["origin"].select(1, 0) * 4 + 6));
    windows += batch.size();
  }
  EXPECT_EQ(windows, 19);
}

TEST(MapBatches, AnOldPreprocessorOfASubsetsDatasetStaysOnItsThread) {
  const auto reads = std::this_thread::get_id();
  std::atomic<int> elsewhere = 0;
  const auto dataset =
      numbers(20).transform(std::make_shared<Old>("noise")).subset({1, 2, 3, 4, 5}).map_batches([&](Batch&) {
        elsewhere += std::this_thread::get_id() != reads;
      });
  EXPECT_EQ(values_of(world_of(dataset), {.batch_size = 2}).size(), 5u);
  EXPECT_EQ(elsewhere, 0);
}

TEST(MapBatches, WorkOnAsManyBatchesAtOnceAsAsked) {
  for (const int threads : {2, 3}) {
    std::barrier all_here(threads);  // passes when so many calls are under way
    std::atomic<int> now = 0, most = 0;
    const auto dataset = numbers(4 * threads)
                             .map_batches(
                                 [&](Batch&) {
                                   const int mine = ++now;
                                   for (int seen = most; seen < mine && !most.compare_exchange_weak(seen, mine);) {
                                   }
                                   all_here.arrive_and_wait();
                                   --now;
                                 },
                                 {.threads = threads});
    const World world(dataset, 1);
    EXPECT_EQ(samples_in(world.shard().iter_batches({.batch_size = 1})), indices(4 * threads));
    EXPECT_EQ(most, threads);
  }
}

TEST(MapBatches, OneThreadMeansOneCallAtATimeInOrder) {
  std::atomic<int> now = 0;
  Samples seen;
  const auto alone = [&](Batch& batch) {
    EXPECT_EQ(++now, 1);
    seen.push_back(first_of(batch));
    std::this_thread::yield();
    --now;
  };
  for (const int ahead : {1, 5}) {
    seen.clear();
    std::deque<std::latch> passed;
    for (int batch = 0; batch < 60; ++batch) passed.emplace_back(1);
    const auto dataset = numbers(60)
                             .map_batches(
                                 [&](Batch& batch) {  // each even batch comes after the next one
                                   const auto first = static_cast<std::size_t>(first_of(batch));
                                   if (first % 2 == 0) passed[first + 1].wait();
                                   passed[first].count_down();
                                 },
                                 {.threads = 4})
                             .map_batches(alone)
                             .map_batches([](Batch& batch) { batch["y"].sum(); }, {.threads = 3});
    const World world(dataset, 1);
    EXPECT_EQ(samples_in(world.shard().iter_batches({.batch_size = 1, .prefetch_batches = ahead})), indices(60));
    EXPECT_EQ(seen, indices(60));
  }
}

TEST(MapBatches, ReadNoFurtherAheadThanSaid) {
  for (const int threads : {1, 2, 4})
    for (const int ahead : {1, 3}) {
      std::atomic<int> calls = 0;
      const auto dataset = numbers(100).map_batches([&](Batch&) { ++calls; }, {.threads = threads});
      const World world(dataset, 1);
      const int most = 2 + ahead + threads - 1;
      {
        auto range = world.shard().iter_batches({.batch_size = 1, .prefetch_batches = ahead});
        auto batch = range.begin();
        ++batch;
        while (calls < most) std::this_thread::yield();
      }
      EXPECT_EQ(calls, most);
    }
}

TEST(MapBatches, AnExceptionComesInThePlaceOfItsBatch) {
  for (const int threads : {1, 2, 4})
    for (const int ahead : {0, 1, 3})
      for (const std::int64_t bad : {0, 3, 9}) {
        const auto dataset = numbers(10).map_batches(
            [bad](Batch& batch) {
              if (first_of(batch) >= bad) throw std::runtime_error("batch " + std::to_string(first_of(batch)));
            },
            {.threads = threads});
        const World world(dataset, 1);
        auto range = world.shard().iter_batches({.batch_size = 1, .prefetch_batches = ahead});
        Samples seen;
        std::string text;
        std::optional<BatchRange::iterator> batch;
        try {
          for (batch = range.begin(); *batch != range.end(); ++*batch) append(seen, **batch);
        } catch (const std::runtime_error& error) {
          text = error.what();
        }
        EXPECT_EQ(text, "batch " + std::to_string(bad));
        EXPECT_EQ(seen, indices(bad));
        if (batch) {
          EXPECT_THROW(++*batch, std::runtime_error) << "and again";
        }
      }
}

TEST(MapBatches, OfSeveralExceptionsTheFirstBatchsOneIsThrown) {
  std::latch later_has_thrown(1);
  const auto dataset = numbers(10).map_batches(
      [&](Batch& batch) {
        if (first_of(batch) == 3) {
          later_has_thrown.count_down();
          throw std::runtime_error("later");
        }
        if (first_of(batch) == 2) {
          later_has_thrown.wait();
          throw std::runtime_error("first");
        }
      },
      {.threads = 2});
  const World world(dataset, 1);
  Samples seen;
  try {
    for (const auto& batch : world.shard().iter_batches({.batch_size = 1})) append(seen, batch);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  EXPECT_EQ(seen, indices(2));
}

TEST(MapBatches, APassMayBeLeftAtAnyTime) {
  for (const int threads : {1, 2, 4})
    for (int leave = 1; leave < 8; ++leave) {
      std::atomic<int> calls = 0;
      const auto dataset =
          numbers(30).map_batches([&](Batch&) { ++calls; }, {.threads = threads}).map_batches(noise("n"));
      const World world(dataset, 1);
      Samples seen;
      for (const auto& batch : world.shard().iter_batches({.batch_size = 1})) {
        append(seen, batch);
        if (static_cast<int>(seen.size()) == leave) break;
      }
      const int after = calls;
      EXPECT_EQ(seen, indices(leave));
      EXPECT_LE(after, leave + threads) << "no more than those in hand and ahead";
      EXPECT_EQ(values_of(world_of(dataset), {.batch_size = 4}).size(), 30u);
    }
}

TEST(MapBatches, AFunctionThatChangesTheNumberOfRowsIsRefused) {
  const BatchFunction::Plain drops = [](Batch& batch) { batch = Batch({{"y", batch["y"].narrow(0, 0, 1)}}); };
  const BatchFunction::WithGenerator other = [](Batch& batch, at::Generator&) { batch.set("z", at::arange(5)); };
  for (const int ahead : {0, 1}) {
    const auto pass = [&](const Dataset& dataset) {
      return [&dataset, ahead] {
        const World world(dataset, 1);
        samples_in(world.shard().iter_batches({.batch_size = 4, .prefetch_batches = ahead}));
      };
    };
    const auto dropped = numbers(8).map_batches(drops), added = numbers(8).map_batches(other);
    EXPECT_EQ(error_of(pass(dropped), ExitCode::data),
              "applying a preprocessor or a function of map_batches(): the batch has 4 rows before it and 1 after it, "
              "in column \"y\". "
              "Leave samples out of the dataset, not of a batch: weights, steps and positions count the dataset's "
              "samples");
    EXPECT_NE(error_of(pass(added), ExitCode::data).find("4 rows before it and 5 after it, in column \"z\""),
              std::string::npos);
    error_of([&] { dropped.read(Samples{1, 2}); }, ExitCode::data);
  }
}

TEST(MapBatches, RefusesBadOptions) {
  const auto nothing = [](Batch&) {};
  EXPECT_NE(error_of([&] { numbers(4).map_batches(nothing, {.threads = 0}); }, ExitCode::usage)
                .find("threads is less than 1"),
            std::string::npos);
  EXPECT_NE(error_of([] { numbers(4).transform(std::make_shared<Old>("n"), {.threads = -1}); }, ExitCode::usage)
                .find("threads is less than 1"),
            std::string::npos);
  for (const auto& make : {std::function([] { numbers(4).map_batches(BatchFunction::Plain()); }),
                           std::function([] { numbers(4).map_batches(BatchFunction::WithGenerator()); })})
    EXPECT_NE(error_of(make, ExitCode::usage).find("there is no function"), std::string::npos);
  EXPECT_NE(error_of([] { numbers(4).transform(nullptr); }, ExitCode::usage).find("there is no preprocessor"),
            std::string::npos);
  EXPECT_NE(error_of(
                [] {
                  chain({std::make_shared<Old>("n"), nullptr});
                },
                ExitCode::usage)
                .find("one of them is null"),
            std::string::npos);
}

/// Random chains; `reference` asks for one thread everywhere.
Dataset random_chain(std::uint64_t seed, bool reference, std::int64_t& count) {
  soak::Dice dice(seed);
  count = dice.between(1, 40);
  auto dataset = numbers(count);
  for (int step = 0, steps = dice.between(1, 6); step < steps; ++step) {
    const auto name = "c" + std::to_string(step);
    const int threads = dice.between(1, 4), kind = dice.below(5);
    const MapOptions options{.threads = reference ? 1 : threads};
    if (kind == 0) dataset = dataset.map_batches(noise(name), options);
    if (kind == 1) dataset = dataset.map_batches([name](Batch& b) { b.set(name, b["x"].sum(1) + b["y"]); }, options);
    if (kind == 2) dataset = dataset.transform(std::make_shared<Applied>(noise(name)), options);
    if (kind == 3 && dice.chance(0.3)) dataset = dataset.transform(std::make_shared<Old>(name));
    if (kind == 4 && dice.chance(0.5)) {
      auto samples = indices(count);
      dice.shuffle(samples);
      samples.resize(static_cast<std::size_t>(count = dice.between(1, static_cast<int>(count))));
      dataset = dataset.subset(samples);
    }
  }
  return dataset;
}

TEST(MapBatches, RandomChainsGiveWhatOneThreadGives) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    std::int64_t count = 0;
    const auto plain = random_chain(seed, true, count), threaded = random_chain(seed, false, count);
    soak::Dice dice(seed + 1'000'000);
    const int ranks = dice.between(1, 3);
    BatchOptions options{.batch_size = dice.between(1, 7), .shuffle = dice.chance(0.5), .prefetch_batches = 0};
    const auto want = values_of(world_of(plain, ranks, seed), options);
    EXPECT_EQ(static_cast<std::int64_t>(want.size()), count);
    options.prefetch_batches = dice.between(0, 4);
    Values values;
    Json position;
    const auto stop = dice.between(1, 6);
    take_pass(world_of(threaded, ranks, seed), options, values, stop, &position);
    if (!position.is_null()) {
      const auto later = world_of(threaded, ranks, seed);
      for (const auto& state : later.states) state->restore(position);
      options.prefetch_batches = dice.between(0, 4);
      take_pass(later, options, values);
    }
    EXPECT_EQ(values, want) << "seed " << seed;
  }
}

}  // namespace
}  // namespace muster::detail::data::map_batches_test
