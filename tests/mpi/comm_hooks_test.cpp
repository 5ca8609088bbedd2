// Communication hooks: their results for a bucket, and for a model's gradients.
#include "muster/comm_hooks.hpp"
#include "gradients/comm_hooks.hpp"
#include "muster/error.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace muster::comm_hooks_test {
namespace {

using test::expect_close;
using test::expect_same_bits_everywhere;
using test::mean_over_ranks;
using test::values;
using test::world;
namespace nn = torch::nn;

using Shapes = std::vector<std::vector<std::int64_t>>;

/// A bucket of gradients of these shapes, as the exchange builds it.
class BucketOf {
 public:
  explicit BucketOf(const Shapes& shapes, at::ScalarType type = at::kFloat) : bucket_(make(shapes, type)) {}

  /// This rank's values; the averages afterwards.
  std::vector<at::Tensor> average(const CommHook& hook, const std::vector<at::Tensor>& gradients) {
    for (std::size_t i = 0; i < gradients.size(); ++i)
      bucket_.views[i].copy_(gradients[i].to(at::kDouble) / world().size());
    hook(bucket_, *group_);
    std::vector<at::Tensor> averages;
    for (const auto& view : bucket_.views) {
      expect_same_bits_everywhere(view, "a view");
      averages.push_back(view.clone());
    }
    return averages;
  }
  const detail::gradients::PowerSgdMemory& memory() const {
    return std::any_cast<const detail::gradients::PowerSgdMemory&>(bucket_.memory);
  }

 private:
  static GradBucket make(const Shapes& shapes, at::ScalarType type) {
    std::vector<std::int64_t> counts;
    for (const auto& shape : shapes)
      counts.push_back(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
    const auto flat = at::zeros({std::accumulate(counts.begin(), counts.end(), std::int64_t{0})}, type);
    std::vector<at::Tensor> views;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      views.push_back(flat.narrow(0, offset, counts[i]).view(shapes[i]));
      offset += counts[i];
    }
    return {flat, std::move(views)};
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_ = make_process_group(world());
  GradBucket bucket_;
};

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

TEST(CompressHooks, AverageWithinTheTypesTolerance) {
  const auto gradient = values({40, 7}, 1);
  const auto want = mean_over_ranks(gradient);
  for (const auto& [hook, epsilon] : {std::pair{bf16_compress_hook(), 0x1p-8}, {fp16_compress_hook(), 0x1p-11}}) {
    const auto have = BucketOf(Shapes{{40, 7}}).average(hook, {gradient})[0];
    // Each rank rounds once, and the sum is rounded once more.
    EXPECT_LE((have - want).abs().max().item<double>(), 2 * epsilon);
    EXPECT_FALSE(at::allclose(have.to(at::kDouble), want, 1e-7, 1e-8)) << "nothing was compressed";
  }
}

TEST(CompressHooks, AverageByTheProgramsWeights) {
  for (const auto& [hook, tolerance] : {std::pair{fp16_compress_hook(), 2e-3}, std::pair{bf16_compress_hook(), 2e-2}}) {
    test::Preparation prepare;
    prepare.options.comm_hook = hook;
    nn::Linear net(6, 5);
    const auto prepared = prepare(net.ptr());
    *prepare.weight = {.local = 64, .global = 64 * world().size(), .total = world().size()};
    const auto loss = [&] { return net(values({4, 6}, 1)).square().mean(); };
    for (const double scale : {1.0, 3000.0, 20.0}) {
      const double mine = scale * (world().rank() == 0 ? 40'000 : 700 * world().rank());
      double all = 0;
      for (int r = 0; r < world().size(); ++r) all += scale * (r == 0 ? 40'000 : 700 * r);
      const auto want = test::weighted_sum(torch::autograd::grad({loss()}, {net->weight})[0], mine / all);
      prepare.weight->given = mine;
      net->zero_grad();
      loss().backward();
      EXPECT_LE(distance(net->weight.grad(), want), tolerance * want.norm().item<double>()) << scale;
      expect_same_bits_everywhere(net->weight.grad(), "weight");
    }
  }
}

TEST(CompressHooks, SendWhatHas16BitsOrIsComplexAsItIs) {
  const auto gradient = values({9}, 1);
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const auto mean = BucketOf(Shapes{{9}}, type).average(fp16_compress_hook(), {gradient * 0.5})[0];
    EXPECT_TRUE(at::allclose(mean.to(at::kDouble), mean_over_ranks(gradient * 0.5), 2e-2, 2e-2));
  }
  const auto complex = at::complex(gradient, gradient * 2);
  const auto group = make_process_group(world());
  const auto flat = complex / world().size();
  GradBucket bucket{flat, {flat}};
  bf16_compress_hook()(bucket, *group);
  expect_close(at::real(flat), mean_over_ranks(gradient), "the real part");
}

TEST(CompressHooks, PassNansOn) {
  auto gradient = values({5}, 1);
  if (world().rank() == 0) gradient[2] = std::numeric_limits<float>::quiet_NaN();
  const auto have = BucketOf(Shapes{{5}}).average(bf16_compress_hook(), {gradient})[0];
  EXPECT_TRUE(std::isnan(have[2].item<float>()));
  EXPECT_TRUE(std::isfinite(have[3].item<float>()));
}

TEST(Orthonormalise, MakesAnyRowsOrthonormal) {
  for (const double scale : {1.0, 1e-30, 0.0}) {
    const auto rows = values({4, 9}, 2) * scale;
    rows[2].copy_(rows[1]);
    rows[3].zero_();
    detail::gradients::orthonormalise(rows, 5);
    EXPECT_TRUE(at::allclose(rows.mm(rows.t()), at::eye(4), 1e-5, 1e-5)) << rows;
  }
  const auto square = values({3, 3}, 1);
  detail::gradients::orthonormalise(square, 5);
  EXPECT_TRUE(at::allclose(square.mm(square.t()), at::eye(3), 1e-5, 1e-5)) << square;
}

TEST(PowerSgd, RecoversAGradientOfItsRank) {
  // The left factor is the same on all ranks, so that the average has rank 1, too.
  const auto left = at::arange(1, 21, at::kFloat).view({20, 1}) / 10, other = at::cos(left * 3);
  const auto rank_one = left.mm(values({1, 12}, 1));
  const auto rank_two = rank_one + other.mm(values({1, 12}, 2));
  const auto vector = values({6}, 3);
  for (const auto& [rank, gradient] : {std::pair{1, rank_one}, {2, rank_one}, {2, rank_two}, {3, rank_two}}) {
    const auto hook = powersgd_hook({.rank = rank, .start_iteration = 0, .min_compression_rate = 1});
    BucketOf bucket(Shapes{{6}, {20, 4, 3}});
    for (int step = 0; step < 3; ++step) {
      const auto have = bucket.average(hook, {vector, gradient.view({20, 4, 3})});
      expect_close(have[0], mean_over_ranks(vector), "a vector");
      EXPECT_TRUE(at::allclose(have[1].view({20, 12}).to(at::kDouble), mean_over_ranks(gradient), 1e-4, 1e-5))
          << "rank " << rank << ", step " << step;
    }
    EXPECT_EQ(bucket.memory().matrices.size(), 1u);
  }
}

TEST(PowerSgd, LeavesAloneWhatWouldNotGain) {
  EXPECT_TRUE(detail::gradients::saves_traffic(100, 100, 1, 2));
  EXPECT_FALSE(detail::gradients::saves_traffic(4, 4, 1, 2)) << "8 numbers for 16 is not more than a factor of 2";
  EXPECT_FALSE(detail::gradients::saves_traffic(100, 1, 1, 1));
  EXPECT_FALSE(detail::gradients::saves_traffic(0, 0, 0, 1));
  const auto hook = powersgd_hook({.start_iteration = 0});
  const auto small = values({4, 4}, 1), empty = values({0, 5}, 1), scalar = values({}, 4);
  const auto have = BucketOf(Shapes{{4, 4}, {0, 5}, {}}).average(hook, {small, empty, scalar});
  expect_close(have[0], mean_over_ranks(small), "a small matrix");
  expect_close(have[2], mean_over_ranks(scalar), "a scalar");
}

TEST(PowerSgd, BeginsWithExactAverages) {
  const auto hook = powersgd_hook({.start_iteration = 2});
  BucketOf bucket(Shapes{{30, 20}});
  for (int step = 0; step < 4; ++step) {
    const auto gradient = values({30, 20}, step);
    const auto have = bucket.average(hook, {gradient})[0];
    const double off = distance(have, mean_over_ranks(gradient));
    if (step < 2)
      EXPECT_LT(off, 1e-5);
    else
      EXPECT_GT(off, 1e-2) << "nothing was compressed";
  }
}

TEST(PowerSgd, WhatItAppliesAndWhatItRemembersIsTheSumOfTheGradients) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto hook = powersgd_hook({.start_iteration = 1});
    BucketOf bucket(Shapes{{30, 20}, {5, 40}}, type);
    std::vector<at::Tensor> applied{at::zeros({30, 20}, at::kDouble), at::zeros({5, 40}, at::kDouble)};
    auto given = std::vector{applied[0].clone(), applied[1].clone()};
    for (int step = 0; step < 25; ++step) {
      const auto at_most = 0.1 * step;
      std::vector gradients{values({30, 20}, at_most), values({5, 40}, at_most + 1)};
      const auto averages = bucket.average(hook, gradients);
      for (std::size_t i = 0; i < 2; ++i) {
        applied[i] += averages[i];
        given[i] += mean_over_ranks(gradients[i]);
      }
    }
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(bucket.memory().matrices[i].error.defined());
      const auto remembered = mean_over_ranks(bucket.memory().matrices[i].error) * world().size();
      const double rounding = type == at::kBFloat16 ? 2e-2 : 1e-4;
      EXPECT_TRUE(at::allclose(applied[i] + remembered, given[i], rounding, 10 * rounding)) << type << " " << i;
    }
  }
}

TEST(PowerSgd, WithErrorFeedbackTheSumOfAConstantGradientIsReached) {
  const auto gradient = values({30, 20}, 1);
  const auto want = mean_over_ranks(gradient);
  std::vector<double> off;
  for (const bool feedback : {true, false}) {
    const auto hook = powersgd_hook({.start_iteration = 0, .error_feedback = feedback});
    BucketOf bucket(Shapes{{30, 20}});
    at::Tensor sum = at::zeros({30, 20}, at::kDouble);
    constexpr int steps = 80;
    for (int step = 0; step < steps; ++step) sum += bucket.average(hook, {gradient})[0];
    off.push_back(distance(sum / steps, want) / want.norm().item<double>());
  }
  EXPECT_LT(off[0], 0.1);
  EXPECT_GT(off[1], 0.3) << "without it a part of the gradient is never seen";
}

TEST(PowerSgd, AnInfiniteGradientLeavesNoTrace) {
  const auto hook = powersgd_hook({.start_iteration = 0});
  BucketOf bucket(Shapes{{30, 20}});
  bucket.average(hook, {values({30, 20}, 1)});
  const auto remembered = bucket.memory().matrices[0].error.clone();
  auto broken = values({30, 20}, 2);
  if (world().rank() == world().size() - 1) broken[3][4] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(bucket.average(hook, {broken})[0].isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(bucket.memory().matrices[0].error, remembered));
  EXPECT_TRUE(bucket.average(hook, {values({30, 20}, 3)})[0].isfinite().all().item<bool>());
}

TEST(PowerSgd, WhatNoRankHasUsedStaysRemembered) {
  test::Preparation prepare;
  const auto power = powersgd_hook({.start_iteration = 0, .min_compression_rate = 1});
  std::vector<at::Tensor> errors;  // of the one bucket, by view
  prepare.options = {.comm_hook = [&](GradBucket& bucket, c10d::ProcessGroup& group) {
    power(bucket, group);
    errors.assign(bucket.views.size(), {});
    for (const auto& matrix : std::any_cast<detail::gradients::PowerSgdMemory&>(bucket.memory).matrices)
      errors[matrix.view] = matrix.error.defined() ? matrix.error.clone() : at::Tensor();
  }};
  auto module = std::make_shared<nn::Module>();
  const auto a = module->register_parameter("a", values({30, 20}, 1)),
             b = module->register_parameter("b", values({20, 40}, 2));
  const auto prepared = prepare(module);
  const auto remembered = [&] {
    for (const auto& error : errors)
      if (error.defined() && error.numel() == b.numel()) return mean_over_ranks(error) * world().size();
    return at::zeros({20, 40}, at::kDouble);
  };
  for (int step = 0; step < 2; ++step) {  // the first may change the order of the bucket, which forgets
    module->zero_grad();
    ((a * values({30, 20}, step)).sum() + (b * values({20, 40}, step)).sum()).backward();
  }
  auto given = remembered(), applied = at::zeros({20, 40}, at::kDouble);
  EXPECT_GT(given.abs().max().item<double>(), 1e-3);
  for (int step = 0; step < 6; ++step) {
    // In every other step no rank uses b; in one step only the last rank does.
    const bool uses = step % 2 == 0 && (step != 4 || world().rank() == world().size() - 1);
    const auto own = uses ? values({20, 40}, 0.3 * step) : at::zeros({20, 40});
    given += mean_over_ranks(own);
    module->zero_grad();
    auto loss = (a * values({30, 20}, step)).sum();
    if (uses) loss = loss + (b * own).sum();
    loss.backward();
    EXPECT_EQ(b.grad().defined(), step % 2 == 0);
    if (b.grad().defined()) applied += b.grad();
    EXPECT_TRUE(at::allclose(applied + remembered(), given, 1e-4, 1e-3)) << "step " << step;
  }
}

TEST(PowerSgd, RefusesWhatMakesNoSense) {
  EXPECT_THROW(powersgd_hook({.rank = 0}), Error);
  EXPECT_THROW(powersgd_hook({.start_iteration = -1}), Error);
  EXPECT_THROW(powersgd_hook({.min_compression_rate = 0}), Error);
}

TEST(CommHooks, AHookOfTheUsersOwnIsWhatGradShows) {
  test::Preparation prepare;
  std::vector<std::pair<std::size_t, bool>> seen;
  prepare.options.comm_hook = [&](GradBucket& bucket, c10d::ProcessGroup& group) {
    std::vector<at::Tensor> tensors{bucket.gradients};
    group.allreduce(tensors)->wait();
    bucket.gradients.mul_(2);
    seen.emplace_back(bucket.index, bucket.last);
    std::int64_t elements = 0;
    for (const auto& view : bucket.views) elements += view.numel();
    EXPECT_EQ(elements, bucket.gradients.numel());
    bucket.memory = bucket.memory.has_value() ? std::any_cast<int>(bucket.memory) + 1 : 1;
    EXPECT_EQ(std::any_cast<int>(bucket.memory), static_cast<int>(seen.size() - 1) / 2 + 1);
  };
  nn::Linear net(nn::LinearOptions(6, 5)), unused(nn::LinearOptions(2, 2));
  const auto prepared = prepare(net.ptr());
  const auto loss = [&] { return net(values({4, 6}, 1)).square().mean(); };
  for (int step = 0; step < 2; ++step) {
    const auto want = mean_over_ranks(torch::autograd::grad({loss()}, {net->weight})[0]) * 2;
    net->zero_grad();
    loss().backward();
    expect_close(net->weight.grad(), want, "twice the average");
  }
  const std::vector<std::pair<std::size_t, bool>> order{{0, false}, {1, true}};
  EXPECT_EQ(seen, (std::vector{order[0], order[1], order[0], order[1]}));
}

TEST(CommHooks, BucketsTakeTheOrderOfTheFirstBackwardOfRankZero) {
  test::Preparation prepare;
  prepare.options.bucket_bytes = prepare.options.first_bucket_bytes = 0;  // each gradient has its own
  std::vector<std::int64_t> sizes;
  prepare.options.comm_hook = [&](GradBucket& bucket, c10d::ProcessGroup& group) {
    test::average_bucket(bucket, group);
    sizes.push_back(bucket.gradients.numel());
  };
  auto module = std::make_shared<nn::Module>();
  const auto a = module->register_parameter("a", values({1}, 1)), b = module->register_parameter("b", values({2}, 2)),
             c = module->register_parameter("c", values({3}, 3));
  const auto prepared = prepare(module);
  const auto loss = [&] {
    // The parameter that is used last gets its gradient first.
    const auto last = world().rank() == 0 ? b : a, first = world().rank() == 0 ? a : b;
    return ((c.sum() * first).sum() * last).square().sum();
  };
  for (int step = 0; step < 3; ++step) {
    const auto want = mean_over_ranks(torch::autograd::grad({loss()}, {b})[0]);
    module->zero_grad();
    loss().backward();
    expect_close(b.grad(), want, "b");
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{3, 2, 1, 2, 1, 3, 2, 1, 3}));
}

TEST(CommHooks, FlagsOfUseAreExact) {
  // A hook's change of values must not affect which parameters count as used.
  test::Preparation prepare;
  prepare.options.comm_hook = [](GradBucket& bucket, c10d::ProcessGroup&) { bucket.gradients.fill_(-0.3); };
  auto module = std::make_shared<nn::Module>();
  const auto all = module->register_parameter("all", values({3}, 1)),
             one = module->register_parameter("one", values({3}, 2)),
             nobody = module->register_parameter("nobody", values({3}, 3));
  const auto prepared = prepare(module);
  auto loss = all.square().sum();
  if (world().rank() == world().size() - 1) loss = loss + one.square().sum();
  loss.backward();
  for (const auto& p : {all, one}) EXPECT_TRUE(p.grad().defined() && at::equal(p.grad(), at::full({3}, -0.3f)));
  EXPECT_FALSE(nobody.grad().defined());
}

/// The loss of a small regression after training.
double train(const CommHook& hook) {
  test::Preparation prepare;
  prepare.options = {.comm_hook = hook};
  torch::manual_seed(3);
  nn::Sequential net(nn::Linear(12, 24), nn::Tanh(), nn::Linear(24, 12));
  const auto prepared = prepare(net.ptr());
  const auto x = values({64, 12}, 1), y = at::tanh(x.roll(3, 1) * 1.5) + 0.3 * x;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int step = 0; step < 90; ++step) {
    optimizer.zero_grad();
    (net->forward(x) - y).square().mean().backward();
    optimizer.step();
  }
  for (const auto& p : net->parameters()) expect_same_bits_everywhere(p, "a weight after training");
  return world().all_reduce((net->forward(x) - y).square().mean().item<double>()) / world().size();
}

TEST(CommHooks, TrainToAboutTheLossOfPlainAverages) {
  const double plain = train({});
  EXPECT_LT(plain, 0.03);
  EXPECT_LT(train(bf16_compress_hook()), 1.3 * plain + 1e-3);
  EXPECT_LT(train(fp16_compress_hook()), 1.3 * plain + 1e-3);
  EXPECT_LT(train(powersgd_hook({.rank = 2, .start_iteration = 5, .min_compression_rate = 1})), 1.5 * plain + 1e-3);
}

}  // namespace
}  // namespace muster::comm_hooks_test
