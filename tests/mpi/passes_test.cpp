// Backward passes that do not go straight through: cut off by an exception, thrown away, over several models in an
// order of each rank's own. In double precision, so that rounding hides nothing, against torch alone.
#include "base/log.hpp"
#include "comm/mpi_threads.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "optim/optimizer_step.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::gradients::passes_test {
namespace {

using test::world;
namespace nn = torch::nn;

int rank() { return world().rank(); }
int size() { return world().size(); }

/// Makes a race likely; nothing depends on it.
void be_late() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

at::Tensor data(at::IntArrayRef sizes, double seed, int of_rank) {
  const auto count = at::empty(sizes).numel();
  return at::sin(at::arange(count, at::kDouble) * 1.7 + seed * 3.1 + of_rank * 0.9).view(sizes);
}

void expect_exactly(const at::Tensor& have, const at::Tensor& want, const std::string& what) {
  ASSERT_EQ(have.defined(), want.defined()) << what;
  if (!have.defined()) return;
  EXPECT_TRUE(at::allclose(have, want, 1e-11, 1e-12))
      << what << ": off by " << (have - want).abs().max().item<double>();
}

/// Small parameters and large ones, whose gradients are born in shared memory; `extra` is left out at will.
struct NetImpl : nn::Module {
  static constexpr int width = 96;
  nn::Linear in{nullptr}, extra{nullptr}, out{nullptr};
  NetImpl() {
    in = register_module("in", nn::Linear(3, width));
    extra = register_module("extra", nn::Linear(width, width));
    out = register_module("out", nn::Linear(width, width));
    to(at::kDouble);
    at::NoGradGuard no_grad;
    double seed = 0;
    for (auto& p : parameters()) p.copy_(data(p.sizes(), ++seed, 0) * 0.1);
  }
  at::Tensor forward(const at::Tensor& input, bool use_extra = true) {
    auto x = at::tanh(in(input));
    if (use_extra) x = x + at::tanh(extra(x));
    return out(x);
  }
  at::Tensor loss(double seed, int of_rank, bool use_extra = true) {
    return forward(data({5, 3}, seed, of_rank), use_extra).square().sum();
  }
};
TORCH_MODULE(Net);

std::vector<at::Tensor> mean_of(const at::Tensor& loss, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> means;
  for (const auto& g : torch::autograd::grad({loss}, parameters)) means.push_back(test::mean_over_ranks(g));
  return means;
}

void expect_gradients(const Net& net, const std::vector<at::Tensor>& want, const std::string& what) {
  const auto named = net->named_parameters();
  for (std::size_t i = 0; i < want.size(); ++i) expect_exactly(named[i].value().grad(), want[i], what + named[i].key());
}

struct Prepared {
  explicit Prepared(const test::Preparation& prepare) : model(prepare(net.ptr())) {}
  Net net;
  std::shared_ptr<PreparedModel> model;
};

/// Prepared as one of virtual workers, of which each rank has `count`.
test::Preparation for_virtual_workers(int count) {
  test::Preparation prepare;
  prepare.shared.share = {.total = count * size(), .first = count * rank(), .count = count, .fixed = true};
  prepare.options.comm_hook = {};
  auto& weight = *prepare.weight;
  weight.local = 1;
  weight.global = weight.total = count * size();
  weight.micro_batches = count;
  return prepare;
}

/// Throws in backward() when a gradient has come that far.
void throw_at(const at::Tensor& tensor, const std::shared_ptr<bool>& throws) {
  tensor.register_hook([throws](const at::Tensor&) {
    if (*throws) throw std::domain_error("boom");
  });
}

TEST(CaughtException, LeavesTheNextGradientsWhole) {
  const test::Preparation prepare;
  for (const bool set_to_none : {true, false}) {
    Prepared a(prepare);
    const auto throws = std::make_shared<bool>(false);
    throw_at(a.net->in->weight, throws);
    for (int step = 0; step < 3; ++step) {
      const auto want = mean_of(a.net->loss(step, rank()), a.net->parameters());
      for (int times = 0; times < (step == 2 ? 2 : 1); ++times) {
        *throws = true;
        EXPECT_THROW(a.net->loss(step + 7, rank()).backward(), std::domain_error);
        *throws = false;
        a.net->zero_grad(set_to_none);
        if (rank() == 1) be_late();
      }
      a.net->loss(step, rank()).backward();
      expect_gradients(a.net, want, "step " + std::to_string(step) + ", ");
      a.net->zero_grad(set_to_none);
    }
  }
}

TEST(CaughtException, OfTwoModelsThatComeInAnotherOrderNextTime) {
  const test::Preparation prepare;
  Prepared a(prepare), b(prepare);
  const auto throws = std::make_shared<bool>(true);
  const auto both = [&](double seed, bool turned, bool cut) {
    auto x = at::ones({}, at::kDouble).requires_grad_() * 2.0;
    if (cut) throw_at(x, throws);
    if (turned) {
      auto first = b.net->loss(seed, rank());
      return first * x + a.net->loss(seed, rank());
    }
    auto first = a.net->loss(seed, rank());
    return first * x + b.net->loss(seed, rank());
  };
  EXPECT_THROW(both(1, false, true).backward(), std::domain_error);
  *throws = false;
  a.net->zero_grad();
  b.net->zero_grad();
  const auto loss = [&] { return both(2, rank() % 2 == 1, false); };
  const auto want_a = mean_of(loss(), a.net->parameters()), want_b = mean_of(loss(), b.net->parameters());
  loss().backward();
  expect_gradients(a.net, want_a, "a.");
  expect_gradients(b.net, want_b, "b.");
}

TEST(CaughtException, OfVirtualWorkersLeavesTheNextStepsWhole) {
  const auto prepare = for_virtual_workers(1);
  auto& weight = *prepare.weight;
  Prepared a(prepare);
  const auto throws = std::make_shared<bool>(false);
  throw_at(a.net->in->weight, throws);
  for (int step = 0; step < 4; ++step) {
    const auto want = mean_of(a.net->loss(step, rank()), a.net->parameters());
    for (int times = 0; times < step; ++times) {
      ++weight.number;
      *throws = true;
      EXPECT_THROW(a.net->loss(step + 7, rank()).backward(), std::domain_error);
      *throws = false;
      a.net->zero_grad();
    }
    ++weight.number;
    a.net->loss(step, rank()).backward();
    expect_gradients(a.net, want, "step " + std::to_string(step) + ", ");
    a.net->zero_grad();
  }
}

TEST(AddedUp, GradientsOfVirtualWorkersOverSteps) {
  for (const int shards : {1, 3}) {
    const auto prepare = for_virtual_workers(shards);
    auto& weight = *prepare.weight;
    Prepared a(prepare);
    const auto throws = std::make_shared<bool>(false);
    throw_at(a.net->in->weight, throws);
    std::vector<at::Tensor> want(a.net->parameters().size());
    const auto loss = [&](int step, int shard) { return a.net->loss(10 * step + shard, rank(), step % 3 != 1); };
    for (int step = 0; step < 6; ++step) {
      for (int shard = 0; shard < shards; ++shard) {
        const auto own = torch::autograd::grad({loss(step, shard)}, a.net->parameters(), {}, {}, false, true);
        for (std::size_t i = 0; i < own.size(); ++i) {
          if (!own[i].defined()) continue;
          const auto part = test::mean_over_ranks(own[i]) / shards;
          want[i] = want[i].defined() ? want[i] + part : part;
        }
      }
      for (weight.micro_batch = 0; weight.micro_batch < shards; ++weight.micro_batch) {
        ++weight.number;
        if (step == 2 || (step == 4 && weight.micro_batch == shards - 1)) {
          *throws = true;
          EXPECT_THROW(loss(step, weight.micro_batch).backward(), std::domain_error);
          *throws = false;
        }
        loss(step, weight.micro_batch).backward();
        if (weight.completes_step()) continue;
        for (const auto& p : a.net->parameters()) EXPECT_FALSE(p.grad().defined());
      }
      const std::string what = std::to_string(shards) + " shards, step " + std::to_string(step) + ", ";
      expect_gradients(a.net, want, what);
      if (step == 3) {
        a.net->zero_grad(/*set_to_none=*/false);
        for (auto& w : want) w = at::zeros_like(w);
      }
    }
  }
}

TEST(AddedUp, NothingRemainsOfAStepThatVirtualWorkersHaveLeft) {
  const auto prepare = for_virtual_workers(2);
  auto& weight = *prepare.weight;
  Prepared a(prepare);
  const auto backward = [&](int micro_batch) {
    weight.micro_batch = micro_batch;
    weight.number = micro_batch > 0 ? weight.number + 1 : ((weight.number >> 32) + 1) << 32;  // of another pass
    a.net->loss(micro_batch, rank()).backward();
  };
  backward(0);
  a.net->zero_grad();
  const auto want = mean_of((a.net->loss(0, rank()) + a.net->loss(1, rank())) / 2, a.net->parameters());
  backward(0);
  backward(1);
  expect_gradients(a.net, want, "none from before, ");
  // Whether the user wants those that were there before is not known.
  backward(0);
  EXPECT_THROW(backward(0), Error);
  a.net->zero_grad();
  backward(0);
  backward(1);
  expect_gradients(a.net, want, "after the error, ");
}

TEST(AddedUp, ABatchOfVirtualWorkersThatHadNoBackwardIsAnErrorAlsoIfItIsTheLastOfItsStep) {
  const auto prepare = for_virtual_workers(3);
  auto& weight = *prepare.weight;
  Prepared a(prepare);
  const auto backward = [&](std::int64_t batch) {
    weight.micro_batch = static_cast<int>(batch % 3);
    weight.number = batch + 1;
    a.net->loss(weight.micro_batch, rank()).backward();
  };
  for (const std::int64_t batch : {0, 1}) backward(batch);
  EXPECT_THROW(backward(3), Error);
  a.net->zero_grad();
  for (const std::int64_t batch : {6, 7, 8, 12, 13})
    backward(batch);  // the step in between has none, which is a choice
  EXPECT_THROW(backward(15), Error);
}

TEST(CaughtException, AfterTheLastGradientIsAnErrorOnRanksThatHadNone) {
  const test::Preparation prepare;
  Prepared a(prepare);
  const auto start = at::ones({5, 3}, at::kDouble).requires_grad_();
  const auto throws = std::make_shared<bool>(rank() == 0);
  throw_at(start, throws);
  // What comes before the model gets its gradient after all of the model's.
  const auto loss = [&] { return a.net->forward(at::tanh(start * 2.0)).square().sum(); };
  const auto want = mean_of(a.net->loss(2, rank()), a.net->parameters());
  if (rank() == 0)
    EXPECT_THROW(loss().backward(), std::domain_error);
  else
    EXPECT_THROW(loss().backward(), Error);
  *throws = false;
  a.net->zero_grad();
  a.net->loss(2, rank()).backward();
  expect_gradients(a.net, want, "");
}

TEST(CaughtException, InAPassThatUnfreezesLeavesTheNextOneWholeWhateverIsFrozenThen) {
  const test::Preparation prepare;
  Net net;
  const auto freeze = [](nn::Linear& layer, bool frozen) {
    for (auto& p : layer->parameters()) p.set_requires_grad(!frozen);
  };
  const std::vector<at::Tensor> want[] = {mean_of(net->loss(0, rank()), net->parameters()),
                                          mean_of(net->loss(1, rank()), net->parameters())};
  freeze(net->in, true);
  freeze(net->extra, true);
  const auto model = prepare(net.ptr());
  const auto throws = std::make_shared<bool>(rank() == 0);
  freeze(net->extra, false);
  const auto start = at::ones({5, 3}, at::kDouble).requires_grad_();
  throw_at(start, throws);
  const auto cut_off = [&] { net->forward(at::tanh(start * 2.0)).square().sum().backward(); };
  if (rank() == 0)
    EXPECT_THROW(cut_off(), std::domain_error);
  else
    EXPECT_THROW(cut_off(), Error);
  net->zero_grad();
  // The first rank comes to what it owes only now.
  freeze(net->extra, true);
  freeze(net->in, false);
  for (int step = 0; step < 2; ++step) {
    net->loss(step, rank()).backward();
    const auto named = net->named_parameters();
    for (std::size_t i = 0; i < want[step].size(); ++i)
      if (named[i].value().requires_grad()) expect_exactly(named[i].value().grad(), want[step][i], named[i].key());
    net->zero_grad();
    freeze(net->extra, false);
  }
}

TEST(CaughtException, LeavesBuffersWhole) {
  // Ranks are cut off at another gradient each, and then average statistics.
  const test::Preparation prepare;
  for (const bool everywhere : {true, false}) {
    Prepared a(prepare);
    const auto statistic = a.net->register_buffer("running_mean", at::zeros({3}, at::kDouble));
    const auto throws = std::make_shared<bool>(everywhere || rank() == 0);
    throw_at(rank() == 0 ? a.net->out->weight : a.net->in->weight, throws);
    if (*throws)
      EXPECT_THROW(a.net->loss(1, rank()).backward(), std::domain_error);
    else
      EXPECT_THROW(a.net->loss(1, rank()).backward(), Error);
    *throws = false;
    statistic.fill_(rank() + 1.0);
    a.model->synchronise_buffers();
    expect_exactly(statistic, at::full({3}, 0.5 * (1 + size()), at::kDouble), "running_mean");
    a.net->zero_grad();
    const auto want = mean_of(a.net->loss(2, rank()), a.net->parameters());
    a.net->loss(2, rank()).backward();
    expect_gradients(a.net, want, "afterwards, ");
  }
}

TEST(CaughtException, MayBeRecoveredFromBeforeTheNextPass) {
  const test::Preparation prepare;
  Prepared a(prepare);
  const auto throws = std::make_shared<bool>(true);
  throw_at(a.net->in->weight, throws);
  for (int times = 0; times < 2; ++times) EXPECT_THROW(a.net->loss(times, rank()).backward(), std::domain_error);
  for (int times = 0; times < 2; ++times) a.model->reducer()->finish_abandoned_rounds();
  *throws = false;
  a.net->zero_grad();
  const auto want = mean_of(a.net->loss(2, rank()), a.net->parameters());
  a.net->loss(2, rank()).backward();
  expect_gradients(a.net, want, "");
  EXPECT_EQ(a.model->reducer()->averaged_round_count(), 1);
}

TEST(CaughtException, OfABackwardInsideBackwardNamesTheParameter) {
  const test::Preparation prepare;
  Prepared a(prepare);
  bool inside = true;
  a.net->in->weight.register_hook([&](const at::Tensor&) {
    const at::AutoGradMode grad(true);
    if (std::exchange(inside, false)) a.net->loss(1, rank()).backward();
  });
  try {
    a.net->loss(0, rank()).backward();
    FAIL() << "a second backward() was taken for a part of the first";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("was given a gradient twice"), std::string::npos) << error.what();
  }
  a.net->zero_grad();
  const auto want = mean_of(a.net->loss(2, rank()), a.net->parameters());
  a.net->loss(2, rank()).backward();
  expect_gradients(a.net, want, "");
}

TEST(Gradient, ThatIsAnotherBranchsTooIsNotAveragedUnderIt) {
  // h + P.unsqueeze(0) with one sample: P and h get the same memory.
  constexpr int n = 4096;
  const test::Preparation prepare;
  auto module = std::make_shared<nn::Module>();
  const auto w = module->register_parameter("w", data({n}, 1, 0));
  const auto p = module->register_parameter("p", data({n}, 2, 0));
  const auto q = module->register_parameter("q", data({n}, 3, 0));
  const auto prepared = prepare(module);
  const auto loss = [&](double seed, bool late) {
    auto h = (data({n}, seed, rank()) * w).unsqueeze(0);
    if (late && rank() == 0)
      h.register_hook([](const at::Tensor& g) {
        be_late();
        return g;
      });
    const auto sum = h + p.unsqueeze(0) + q.unsqueeze(0);
    return (sum * data({1, n}, seed + 1, rank())).square().sum();
  };
  for (int step = 0; step < 4; ++step) {
    const auto want = mean_of(loss(step, false), {w, p, q});
    loss(step, true).backward();
    expect_exactly(p.grad(), want[1], "p");
    expect_exactly(q.grad(), want[2], "q");
    expect_exactly(w.grad(), want[0], "w");
    module->zero_grad();
  }
}

TEST(Gradient, ThatAHookHasKeptAViewOfIsLeftAlone) {
  const test::Preparation prepare;
  Prepared a(prepare);
  at::Tensor kept;
  a.net->out->weight.register_hook([&](const at::Tensor& g) { kept = g.detach(); });
  const auto own = torch::autograd::grad({a.net->loss(1, rank())}, {a.net->out->weight})[0].clone();
  const auto want = mean_of(a.net->loss(1, rank()), a.net->parameters());
  a.net->loss(1, rank()).backward();
  expect_gradients(a.net, want, "");
  expect_exactly(kept, own, "this rank's");
}

TEST(Gradient, ThatBackwardWasGivenIsLeftAlone) {
  constexpr int n = 4096;
  const test::Preparation prepare;
  auto module = std::make_shared<nn::Module>();
  const auto p = module->register_parameter("p", data({n}, 2, 0));
  const auto q = module->register_parameter("q", data({n}, 3, 0));
  const auto prepared = prepare(module);
  // One of them is used by the first rank alone, so that the averages differ.
  const auto given = data({1, n}, 4, rank());
  auto output = p.unsqueeze(0);
  if (rank() == 0) output = output + q.unsqueeze(0);
  output.backward(given);
  const auto zero = at::zeros({n}, at::kDouble);
  expect_exactly(given, data({1, n}, 4, rank()), "given");
  expect_exactly(p.grad(), test::mean_over_ranks(given[0]), "p");
  expect_exactly(q.grad(), test::mean_over_ranks(rank() == 0 ? given[0] : zero), "q");
}

/// A model with its prepared optimizer, and one of torch alone that is given all ranks' batches.
template <class O, class Options>
struct Training {
  test::Preparation prepare;
  Prepared a{prepare};
  Net plain;
  std::unique_ptr<PreparedOptimizer<O>> optimizer;
  O plain_optimizer;

  Training(const Options& options, Fuse fuse) : plain_optimizer(plain->parameters(), options) {
    O own(a.net->parameters(), options);
    auto step = optim::make_optimizer_step(own, {a.model}, {.fuse = fuse});
    optimizer = std::make_unique<PreparedOptimizer<O>>(std::move(own), std::move(step));
  }
  void samples(const std::vector<std::int64_t>& of_ranks) {
    samples_ = of_ranks;
    prepare.weight->local = of_ranks.at(static_cast<std::size_t>(rank()));
    prepare.weight->global = 0;
    for (int r = 0; r < size(); ++r) prepare.weight->global += of_ranks[static_cast<std::size_t>(r)];
  }
  /// `uses_extra(r)`: true if the model of rank r uses its parameter `extra`.
  template <class Uses>
  void backward(double seed, Uses&& uses_extra) {
    a.net->loss(seed, rank(), uses_extra(rank())).backward();
    auto sum = at::zeros({}, at::kDouble);
    for (int r = 0; r < size(); ++r) {
      const double share = samples_.empty() ? 1.0 / size()
                                            : static_cast<double>(samples_[static_cast<std::size_t>(r)]) /
                                                  static_cast<double>(prepare.weight->global);
      if (share > 0) sum = sum + plain->loss(seed, r, uses_extra(r)) * share;
    }
    sum.backward();
  }
  void backward(double seed, bool use_extra = true) {
    backward(seed, [&](int) { return use_extra; });
  }
  void zero_grad() {
    optimizer->zero_grad();
    plain_optimizer.zero_grad();
  }
  void step() {
    optimizer->step();
    plain_optimizer.step();
  }
  void expect_alike(const std::string& what) const {
    const auto have = a.net->named_parameters(), want = plain->named_parameters();
    for (std::size_t i = 0; i < have.size(); ++i)
      expect_exactly(have[i].value(), want[i].value(), what + ", " + have[i].key());
  }

 private:
  std::vector<std::int64_t> samples_;
};

using Sgd = Training<torch::optim::SGD, torch::optim::SGDOptions>;
using AdamW = Training<torch::optim::AdamW, torch::optim::AdamWOptions>;

TEST(ThrownAway, AGradientIsGoneThoughTheNextPassDoesNotReachIt) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Sgd training(torch::optim::SGDOptions(0.001).momentum(0.9), fuse);
    for (int step = 0; step < 4; ++step) {
      training.zero_grad();
      training.backward(step);
      if (step == 1 || step == 2) {
        training.zero_grad();
        if (step == 1) training.backward(step + 0.5, false);  // in step 2 there is no other pass
      }
      training.step();
      training.expect_alike("step " + std::to_string(step));
    }
  }
}

TEST(ThrownAway, APassWithoutAveragingLeavesNoMark) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    AdamW training(torch::optim::AdamWOptions(0.01), fuse);
    const int ghost = size() - 1;
    for (int step = 0; step < 4; ++step) {
      training.samples({3, 3, 3});
      training.zero_grad();
      if (step % 2 == 1) {
        {
          const NoSync scope(training.prepare.no_sync_depth);
          training.backward(step);
        }
        training.zero_grad();
        // What only a batch of no samples reaches.
        auto samples = std::vector<std::int64_t>{2, 2, 2};
        if (size() > 1) samples[static_cast<std::size_t>(ghost)] = 0;
        training.samples(samples);
        training.backward(step + 0.5, [&](int r) { return size() > 1 && r == ghost; });
        if (fuse == Fuse::never) {
          EXPECT_FALSE(training.a.net->extra->weight.grad().defined());
        }
      } else {
        training.backward(step);
      }
      training.step();
      training.expect_alike("step " + std::to_string(step));
    }
  }
}

TEST(AFusedStep, AveragesWhatPassesWithAndWithoutAveragingHaveLeft) {
  Sgd training(torch::optim::SGDOptions(0.001).momentum(0.9), Fuse::always);
  if (!training.optimizer->fused()) GTEST_SKIP() << "nothing is fused";
  for (int step = 0; step < 4; ++step) {
    training.zero_grad();
    training.backward(step, step % 2 == 0);
    {
      const NoSync scope(training.prepare.no_sync_depth);
      training.backward(step + 0.3);
    }
    if (step > 1) training.backward(step + 0.6, false);
    training.step();
    training.expect_alike("step " + std::to_string(step));
  }
}

TEST(AFusedStep, AveragesWhatWasMadeByHandThoughAnExceptionCameBefore) {
  Sgd training(torch::optim::SGDOptions(0.001).momentum(0.9), Fuse::always);
  if (!training.optimizer->fused()) GTEST_SKIP() << "nothing is fused";
  const auto throws = std::make_shared<bool>(false);
  throw_at(training.a.net->in->weight, throws);
  for (int step = 0; step < 3; ++step) {
    if (step == 1) {
      *throws = true;
      EXPECT_THROW(training.a.net->loss(step, rank()).backward(), std::domain_error);
      *throws = false;
    }
    const auto parameters = training.a.net->parameters(), plain = training.plain->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = data(parameters[i].sizes(), step + 0.1 * static_cast<double>(i), rank());
      plain[i].mutable_grad() = test::mean_over_ranks(parameters[i].grad());
    }
    training.step();
    training.expect_alike("step " + std::to_string(step));
  }
}

TEST(AFusedStep, OfAPassThatAnotherRankHasAbandonedIsAnError) {
  Sgd training(torch::optim::SGDOptions(0.001).momentum(0.9), Fuse::always);
  if (!training.optimizer->fused()) GTEST_SKIP() << "nothing is fused";
  const auto throws = std::make_shared<bool>(rank() == 0);
  throw_at(training.a.net->in->weight, throws);
  if (rank() == 0)
    EXPECT_THROW(training.a.net->loss(7, rank()).backward(), std::domain_error);
  else
    EXPECT_THROW(training.a.net->loss(7, rank()).backward(), Error);
  *throws = false;
  for (int step = 0; step < 3; ++step) {
    training.zero_grad();
    training.backward(step);
    training.step();
    training.expect_alike("step " + std::to_string(step));
  }
}

TEST(AFusedStep, AfterAnExceptionFromBeforeItWasPrepared) {
  const test::Preparation prepare;
  Prepared a(prepare);
  const auto throws = std::make_shared<bool>(true);
  throw_at(a.net->in->weight, throws);
  EXPECT_THROW(a.net->loss(7, rank()).backward(), std::domain_error);
  *throws = false;
  a.net->zero_grad();
  const auto want = mean_of(a.net->loss(1, rank()), a.net->parameters());
  std::vector<at::Tensor> before;
  for (const auto& p : a.net->parameters()) before.push_back(p.detach().clone());
  torch::optim::SGD own(a.net->parameters(), torch::optim::SGDOptions(0.5));
  auto how = optim::make_optimizer_step(own, {a.model}, {.fuse = Fuse::always});
  PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(how));
  a.net->loss(1, rank()).backward();
  optimizer.step();
  const auto named = a.net->named_parameters();
  for (std::size_t i = 0; i < want.size(); ++i)
    expect_exactly(named[i].value(), before[i] - want[i] * 0.5, named[i].key());
}

TEST(AFusedStep, ThatNeverCameLeavesItsGradientsToTheNextPass) {
  const test::Preparation prepare;
  Prepared a(prepare);
  const auto first = mean_of(a.net->loss(1, rank()), a.net->parameters());
  const auto in = mean_of(a.net->loss(2, rank(), false), {a.net->in->weight});
  {
    torch::optim::SGD own(a.net->parameters(), torch::optim::SGDOptions(0.5));
    const auto how = optim::make_optimizer_step(own, {a.model}, {.fuse = Fuse::always});
    a.net->loss(1, rank()).backward();
  }
  a.net->loss(2, rank(), false).backward();
  expect_exactly(a.net->in->weight.grad(), first[0] + in[0], "of both");
  expect_exactly(a.net->extra->weight.grad(), first[2], "of the first alone");
}

TEST(TwoModels, MayComeInAnotherOrderOnEachRank) {
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    Sgd a(torch::optim::SGDOptions(0.001).momentum(0.9), fuse), b(torch::optim::SGDOptions(0.002).momentum(0.8), fuse);
    const auto loss = [](Net& first, Net& second, double seed, int of_rank) {
      auto l = first->loss(seed, of_rank);
      return l + second->loss(seed + 0.3, of_rank);
    };
    for (int step = 0; step < 3; ++step) {
      a.zero_grad();
      b.zero_grad();
      for (const double seed : {step + 0.0, step + 0.5}) {
        const bool turned = rank() % 2 == 1;
        (turned ? loss(b.a.net, a.a.net, seed + 0.3, rank()) : loss(a.a.net, b.a.net, seed, rank())).backward();
        auto sum = at::zeros({}, at::kDouble);
        for (int r = 0; r < size(); ++r)
          sum = sum + (r % 2 == 1 ? loss(b.plain, a.plain, seed + 0.3, r) : loss(a.plain, b.plain, seed, r)) / size();
        sum.backward();
      }
      a.step();
      b.step();
      a.expect_alike("a");
      b.expect_alike("b");
    }
  }
}

TEST(TwoModels, MayBeUnfrozenTogetherAndComeInAnotherOrderOnEachRank) {
  const test::Preparation prepare;
  Net first, second;
  for (auto* net : {&first, &second}) (*net)->extra->weight.set_requires_grad(false);
  const auto a = prepare(first.ptr()), b = prepare(second.ptr());
  for (auto* net : {&first, &second}) (*net)->extra->weight.set_requires_grad(true);
  const auto loss = [&] {
    auto& early = rank() % 2 == 1 ? second : first;
    auto& late = rank() % 2 == 1 ? first : second;
    auto l = early->loss(1, rank());
    return l + late->loss(1, rank());
  };
  const auto want = mean_of(loss(), first->parameters());
  loss().backward();
  expect_gradients(first, want, "a.");
  expect_gradients(second, mean_of(loss(), second->parameters()), "b.");
}

/// Ranks are asked to stop at some steps: none, all, the last, the first.
bool asked(int step, int of_rank) {
  return step == 1 || (step == 2 && of_rank == size() - 1) || (step == 3 && of_rank == 0);
}

TEST(AStopRequest, RidesWithEveryPass) {
  test::Preparation prepare;
  int step = 0;
  prepare.shared.stop_requested = [&] { return asked(step, rank()); };
  Prepared a(prepare);
  auto& reducer = *a.model->reducer();
  EXPECT_FALSE(reducer.any_stop_requested());
  for (; step < 5; ++step) {
    a.net->loss(step, rank(), step != 3).backward();
    EXPECT_EQ(reducer.any_stop_requested(), step >= 1 && step <= 3) << step;
    EXPECT_EQ(reducer.averaged_round_count(), step + 1);
    const NoSync scope(prepare.no_sync_depth);
    a.net->loss(step, rank()).backward();
    EXPECT_EQ(reducer.averaged_round_count(), step + 1) << "nothing was averaged";
  }
}

TEST(AStopRequest, RidesWithAPreparedOptimizersStep) {
  for (const double norm : {0.0, 1.0}) {  // with a norm, gradients are gone through twice
    test::Preparation prepare;
    int step = 0;
    prepare.shared.stop_requested = [&] { return asked(step, rank()); };
    Prepared a(prepare);
    torch::optim::SGD own(a.net->parameters(), torch::optim::SGDOptions(0.001));
    auto how = optim::make_optimizer_step(own, {a.model}, {.max_grad_norm = norm, .fuse = Fuse::always});
    PreparedOptimizer<torch::optim::SGD> optimizer(std::move(own), std::move(how));
    for (; step < 5; ++step) {
      optimizer.zero_grad();
      a.net->loss(step, rank()).backward();
      optimizer.step();
      EXPECT_EQ(a.model->reducer()->any_stop_requested(), step >= 1 && step <= 3) << step;
      EXPECT_EQ(a.model->reducer()->averaged_round_count(), step + 1);
    }
  }
}

TEST(AStopRequest, RidesWithSparseGradients) {
  for (const bool alone : {true, false}) {
    test::Preparation prepare;
    int step = 0;
    prepare.shared.stop_requested = [&] { return asked(step, rank()); };
    auto module = std::make_shared<nn::Module>();
    auto words = module->register_module("words", nn::Embedding(nn::EmbeddingOptions(6, 2).sparse(true)));
    auto out = nn::Linear(2, 2);
    if (!alone) module->register_module("out", out);
    const auto prepared = prepare(module);
    for (; step < 5; ++step) {
      const auto x = words->forward(at::full({2}, step, at::kLong));
      (alone ? x : out->forward(x)).sum().backward();
      EXPECT_EQ(prepared->reducer()->any_stop_requested(), step >= 1 && step <= 3) << step;
    }
  }
}

TEST(AStopRequest, RidesWithTheShardsOfVirtualWorkers) {
  constexpr int shards = 2;
  auto prepare = for_virtual_workers(shards);
  auto& weight = *prepare.weight;
  int step = 0;
  prepare.shared.stop_requested = [&] { return weight.micro_batch == 0 && asked(step, rank()); };
  Prepared a(prepare);
  for (; step < 5; ++step)
    for (weight.micro_batch = 0; weight.micro_batch < shards; ++weight.micro_batch) {
      ++weight.number;
      EXPECT_EQ(a.model->reducer()->averaged_round_count(), step);
      a.net->loss(step, rank()).backward();
      if (weight.completes_step()) {
        EXPECT_EQ(a.model->reducer()->any_stop_requested(), step >= 1 && step <= 3) << step;
      }
    }
}

int progress_threads() {
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    threads += name == "muster-gradient";
  }
  return threads;
}

TEST(ModelOptions, AThreadAveragesInSharedMemory) {
  test::Preparation prepare;
  prepare.shared.share_memory = true;
  prepare.options.comm_hook = {};
  prepare.options.progress_thread = true;
  Prepared a(prepare);
  const bool on_one_node = prepare.shared.communicator.topology().num_nodes == 1;
  EXPECT_EQ(progress_threads(), size() > 1 && (on_one_node || comm::threads_may_call_mpi()) ? 1 : 0);
  const auto want = mean_of(a.net->loss(1, rank()), a.net->parameters());
  a.net->loss(1, rank()).backward();
  expect_gradients(a.net, want, "");
}

TEST(ModelOptions, SizesOfBucketsThatHaveNoEffectAreSaid) {
  const auto folder = test::shared_folder();
  const auto said = [&](const test::Preparation& prepare, const std::string& name) {
    const auto file = folder / (name + std::to_string(rank()));
    log::write_to(file);
    const Prepared a(prepare);
    log::write_to({});
    std::ifstream in(file);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    return text.find("bucket_bytes and first_bucket_bytes have no effect") != std::string::npos;
  };
  test::Preparation prepare;
  const bool shared = size() > 1 && !test::by("buckets") && !test::by("hook");
  EXPECT_EQ(said(prepare, "small"), shared);
  const auto sizes = prepare.options;
  prepare.options.bucket_bytes = ModelOptions().bucket_bytes;
  prepare.options.first_bucket_bytes = ModelOptions().first_bucket_bytes;
  EXPECT_FALSE(said(prepare, "default")) << "nobody has asked";
  prepare.options = sizes;
  prepare.options.comm_hook = {};
  prepare.shared.share.fixed = true;
  EXPECT_TRUE(said(prepare, "virtual"));
}

}  // namespace
}  // namespace muster::detail::gradients::passes_test
