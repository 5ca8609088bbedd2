// Passes that draw samples by weights.
#include "muster/error.hpp"
#include "unit/pass_world.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace muster::detail::data::weighted_passes_test {
namespace {

using namespace pass_world;

at::Tensor weights_of(std::vector<double> values) { return at::tensor(values, at::kDouble); }

/// Weights of `n` samples: 0, 1, 2, …
at::Tensor rising(std::int64_t n) { return at::arange(n, at::kDouble); }

template <class Use>
std::string refused(Use&& use, ExitCode code = ExitCode::usage) {
  try {
    use();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

TEST(WeightedPasses, DrawAsOftenAsTheWeightsSay) {
  const std::vector<double> weights{0, 1, 2, 0.5, 0, 4};
  constexpr std::int64_t draws = 30'000;
  const auto samples =
      samples_in(World(6, 1, true, 5)
                     .shard()
                     .iter_batches({.batch_size = 1000, .weights = weights_of(weights), .num_samples = draws}));
  ASSERT_EQ(std::ssize(samples), draws);
  std::map<std::int64_t, std::int64_t> hits;
  for (const auto sample : samples) ++hits[sample];
  double chi = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto expected = weights[i] / 7.5 * draws, hit = static_cast<double>(hits[static_cast<std::int64_t>(i)]);
    if (weights[i] == 0)
      EXPECT_EQ(hit, 0);
    else
      chi += (hit - expected) * (hit - expected) / expected;
  }
  EXPECT_LT(chi, 3 + 6 * std::sqrt(2.0 * 3)) << "of three degrees of freedom";
}

TEST(WeightedPasses, DrawIndependently) {
  // Of two samples with the same weight: how often two draws that follow each other are the same.
  const auto samples = samples_in(
      World(2, 1).shard().iter_batches({.batch_size = 1000, .weights = at::ones({2}), .num_samples = 10'000}));
  int same = 0;
  for (std::size_t i = 0; i + 1 < samples.size(); ++i) same += samples[i] == samples[i + 1] ? 1 : 0;
  EXPECT_NEAR(same, 5000, 6 * 50);
}

// Pins the numbers: a run is continued on another machine by another build.
TEST(WeightedPasses, AreTheSameOnEveryMachine) {
  const auto samples =
      samples_in(World(1000, 1, true, 42).shard().iter_batches({.weights = rising(1000), .num_samples = 5}));
  EXPECT_EQ(samples, (Samples{590, 899, 537, 613, 772}));
}

TEST(WeightedPasses, AreTheSameAtAnyWorldAndDifferByEpochPassAndSeed) {
  const BatchOptions options{.global_batch_size = 7, .weights = rising(40), .num_samples = 100};
  const auto alone = in_order(World(40, 1, true, 3), options);
  ASSERT_EQ(alone.size(), 100u);
  for (int ranks = 2; ranks <= 5; ++ranks) EXPECT_EQ(in_order(World(40, ranks, true, 3), options), alone) << ranks;
  EXPECT_EQ(samples_in(World(40, 1, false, 3).shard().iter_batches(options)).size(), 100u) << "whole on each rank";
  std::set<Samples> orders{in_order(World(40, 1, true, 4), options)};
  const World world(40, 1, true, 3);
  for (const std::int64_t epoch : {0, 1}) {
    world.shard().set_epoch(epoch);
    for (int pass = 0; pass < 2; ++pass) orders.insert(in_order(world, options));
  }
  EXPECT_TRUE(orders.contains(alone));
  EXPECT_EQ(orders.size(), 5u);
}

TEST(WeightedPasses, TakeCountSamplesUnlessTold) {
  const World world(10, 1);
  EXPECT_EQ(world.shard().iter_batches({.batch_size = 3, .weights = rising(10)}).num_batches(), 4);
  EXPECT_EQ(world.shard()
                .iter_batches({.batch_size = 3, .drop_last = true, .weights = rising(10), .num_samples = 25})
                .num_batches(),
            8);
  EXPECT_EQ(samples_in(world.shard().iter_batches({.batch_size = 3, .weights = at::ones({10}, at::kInt)})).size(), 10u);
}

TEST(WeightedPasses, ResumeAtAnyWorld) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 60; ++round) {
    const auto count = static_cast<std::int64_t>(1 + random() % 30),
               draws = static_cast<std::int64_t>(1 + random() % 60);
    auto weights = at::zeros({count}, at::kDouble);
    for (std::int64_t i = 0; i < count; ++i) weights[i] = static_cast<double>(random() % 3);
    weights[static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(count))] = 1;
    BatchOptions options{
        .global_batch_size = static_cast<std::int64_t>(1 + random() % 9), .weights = weights, .num_samples = draws};
    const auto whole = in_order(World(count, 1, true, 8), options);
    const auto steps = static_cast<std::int64_t>(1 + random() % 5);
    Json position;
    auto seen = in_order(World(count, 1 + static_cast<int>(random() % 4), true, 8), options, steps, &position);
    if (position.is_null()) continue;  // the pass was shorter
    const World later(count, 1 + static_cast<int>(random() % 4), true, 99);
    for (const auto& state : later.states) state->restore(Json::parse(position.dump()));
    options.global_batch_size = static_cast<std::int64_t>(1 + random() % 9);
    options.num_samples = static_cast<std::int64_t>(1 + random() % 60);  // of the next pass
    const auto rest = in_order(later, options);
    seen.insert(seen.end(), rest.begin(), rest.end());
    EXPECT_EQ(seen, whole) << round;
    EXPECT_EQ(std::ssize(in_order(later, options)), *options.num_samples) << round;
  }
}

TEST(WeightedPasses, AnInterruptedOneNeedsItsWeights) {
  Json position;
  const BatchOptions options{.batch_size = 2, .weights = rising(10)};
  const auto whole = in_order(World(10, 1), options);
  in_order(World(10, 1), options, 2, &position);
  const auto resumed = [&](const Json& saved, const BatchOptions& with, std::int64_t count = 10) {
    const World later(count, 1);
    later.states[0]->restore(saved);
    return in_order(later, with);
  };
  EXPECT_EQ(resumed(position, options), Samples(whole.begin() + 4, whole.end()));
  const std::string fact = "the checkpoint was saved in the middle of a pass with other weights";
  for (const auto& other : {at::ones({10}), at::Tensor()})
    EXPECT_NE(refused([&] { resumed(position, {.batch_size = 2, .weights = other}); }, ExitCode::data).find(fact),
              std::string::npos);
  EXPECT_NE(refused([&] { resumed(position, {.batch_size = 2, .weights = rising(11)}, 11); }, ExitCode::data)
                .find("it has 11 samples and had 10"),
            std::string::npos);
  // A pass without weights goes on as it began, and the next one has the weights.
  in_order(World(10, 1), {.batch_size = 2, .shuffle = true}, 2, &position);
  const auto shuffled = in_order(World(10, 1), {.batch_size = 2, .shuffle = true});
  EXPECT_EQ(resumed(position, options), Samples(shuffled.begin() + 4, shuffled.end()));
}

TEST(WeightedPasses, RefuseADamagedPosition) {
  Json position;
  in_order(World(10, 1), {.batch_size = 2, .weights = rising(10), .num_samples = 30}, 12, &position);
  EXPECT_EQ(position.at("consumed"), 24) << "more than there are samples";
  for (const auto& [key, value] : std::vector<std::pair<std::string, Json>>{
           {"draws", Json{{"count", 0}, {"weights", 1}}}, {"draws", Json{{"count", "ten"}}}, {"samples", 20}}) {
    auto wrong = position;
    wrong[key] = value;
    EXPECT_THROW(World(10, 1).states[0]->restore(wrong), Error) << wrong;
  }
}

TEST(WeightedPasses, RefuseWhatMakesNoSense) {
  const World world(4, 1);
  const auto says = [&](const BatchOptions& options) { return refused([&] { world.shard().iter_batches(options); }); };
  const auto expect = [&](const BatchOptions& options, const std::string& fact) {
    EXPECT_NE(says(options).find(fact), std::string::npos) << fact;
  };
  const std::string shape = "its weights are not a tensor [4] of real numbers on the CPU";
  expect({.weights = at::ones({5})}, shape);
  expect({.weights = at::ones({4, 1})}, shape);
  expect({.weights = at::ones({4}, at::kComplexDouble)}, shape);
  expect({.weights = at::ones({4}, at::TensorOptions(at::kMeta))}, shape);
  expect({.weights = weights_of({1, -0.5, 1, 1})}, "the weight of sample 1 is -0.5");
  expect({.weights = weights_of({1, 1, std::nan(""), 1})}, "the weight of sample 2 is nan");
  expect({.weights = weights_of({1, 1, 1, std::numeric_limits<double>::infinity()})}, "the weight of sample 3 is inf");
  expect({.weights = at::zeros({4})}, "all weights are 0");
  expect({.shuffle = true, .weights = at::ones({4})}, "weights are given together with a shuffle");
  expect({.local_shuffle_buffer_size = 2, .weights = at::ones({4})}, "weights are given together with a shuffle");
  expect({.num_samples = 3}, "num_samples is given without weights");
  expect({.weights = at::ones({4}), .num_samples = 0}, "num_samples is less than 1");
  const auto stream = Dataset::from_stream([](const StreamShard&) -> StreamReader { return {}; });
  const auto state = std::make_shared<ShardState>(PassPositionOptions{.name = "stream", .stream = true}, stream);
  EXPECT_NE(refused([&] {
              DatasetShard(state).iter_batches({.weights = at::ones({4})});
            }).find("weights is set, but a stream gives its rows in its own order"),
            std::string::npos);
  EXPECT_NE(refused([&] {
              DatasetShard(state).iter_batches({.bucket_samples = 8});
            }).find("bucket_samples is set, but a stream gives its rows in its own order. Order them where they"),
            std::string::npos);
}

TEST(WeightedPasses, WeightsThatChangeLaterDoNotCount) {
  const World world(4, 1);
  auto weights = at::zeros({4});
  weights[2] = 1;
  auto range = world.shard().iter_batches({.batch_size = 2, .weights = weights});
  weights[1] = 100;
  EXPECT_EQ(samples_in(std::move(range)), (Samples{2, 2, 2, 2}));
}

TEST(BalancedWeights, DrawEachClassEquallyOften) {
  const auto labels = at::tensor({5, 5, -1, 5, 7, 5, 7, 5}, at::kInt);
  const auto weights = balanced_weights(labels);
  ASSERT_EQ(weights.scalar_type(), at::kDouble);
  std::map<std::int64_t, double> of_class;
  for (std::int64_t i = 0; i < labels.numel(); ++i) of_class[labels[i].item<int>()] += weights[i].item<double>();
  EXPECT_EQ(of_class.size(), 3u);
  for (const auto& [label, weight] : of_class) EXPECT_DOUBLE_EQ(weight, 1.0 / 3) << label;
  EXPECT_EQ(weights[0].item<double>(), weights[7].item<double>());
  EXPECT_EQ(balanced_weights(at::ones({1}, at::kBool)).item<double>(), 1);
  for (const auto& wrong : {at::Tensor(), at::ones({3}), at::ones({2, 2}, at::kLong), at::ones({0}, at::kLong)})
    EXPECT_NE(refused([&] { balanced_weights(wrong); }).find("the labels are not a tensor [samples] of whole numbers"),
              std::string::npos);
}

}  // namespace
}  // namespace muster::detail::data::weighted_passes_test
