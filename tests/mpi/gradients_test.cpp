// What backward() leaves in .grad: the mean over the ranks, weighted by samples.
#include "base/log.hpp"
#include "gradients/alone_exchange.hpp"
#include "gradients/reducer.hpp"
#include "gradients/shared_exchange.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"
#include "support/io_errors.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <cerrno>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::gradients::gradients_test {
namespace {

using test::expect_close;
using test::expect_same_bits_everywhere;
using test::values;
using test::world;
namespace nn = torch::nn;

/// Wide enough that the middle layer's weight counts as a large gradient; the others are small.
constexpr int width = 96;

/// Three layers; the middle one can be skipped.
struct NetImpl : nn::Module {
  nn::Linear in{nullptr}, middle{nullptr}, out{nullptr};
  NetImpl() {
    in = register_module("in", nn::Linear(3, width));
    middle = register_module("middle", nn::Linear(width, width));
    out = register_module("out", nn::Linear(width, 2));
  }
  at::Tensor forward(at::Tensor x, bool use_middle = true) {
    x = at::tanh(in(x));
    if (use_middle) x = at::tanh(middle(x));
    return out(x);
  }
};
TORCH_MODULE(Net);

std::vector<at::Tensor> operator+(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> sum;
  for (std::size_t i = 0; i < a.size(); ++i) sum.push_back(a[i] + b[i]);
  return sum;
}

class Gradients : public testing::Test {
 protected:
  /// The loss of batch `seed` of this rank.
  at::Tensor loss(double seed, bool use_middle = true) {
    return net_->forward(values({5, 3}, seed), use_middle).square().mean();
  }
  /// Sets the number of this rank's samples in the step; rank r has samples[r].
  void batch(const std::vector<std::int64_t>& samples) {
    weight().local = samples.at(static_cast<std::size_t>(rank()));
    weight().global = 0;
    for (int r = 0; r < size(); ++r) weight().global += samples[static_cast<std::size_t>(r)];
  }
  double share() { return weight().relative() / size(); }
  /// Gives the batch a weight; rank r has weights[r].
  void give(const std::vector<double>& weights) { weight().given = weights.at(static_cast<std::size_t>(rank())); }
  /// The gradient of the mean over everything that the passes count; pass i has the loss(i) and weights[i].
  std::vector<at::Tensor> mean_of_all(const std::vector<std::vector<double>>& weights) {
    double all = 0;
    for (const auto& pass : weights)
      for (int r = 0; r < size(); ++r) all += pass[static_cast<std::size_t>(r)];
    std::vector<at::Tensor> sums;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      std::vector<at::Tensor> parts;
      for (const auto& g : local(loss(static_cast<double>(i))))
        parts.push_back(test::weighted_sum(g, weights[i][static_cast<std::size_t>(rank())] / all));
      sums = sums.empty() ? parts : sums + parts;
    }
    return sums;
  }
  step::BatchWeight& weight() { return *prepare_.weight; }
  void zero_grad() { net_->zero_grad(); }
  std::vector<at::Tensor> parameters() { return net_->parameters(); }

  /// This rank's own gradients of `loss`; .grad is unchanged.
  std::vector<at::Tensor> local(const at::Tensor& loss) {
    return torch::autograd::grad({loss}, parameters(), {}, std::nullopt, false, true);
  }
  /// The expected average of the ranks' local gradients, in double precision; undefined if this rank has none.
  std::vector<at::Tensor> together(const at::Tensor& loss) {
    std::vector<at::Tensor> sums;
    for (const auto& g : local(loss)) sums.push_back(g.defined() ? test::weighted_sum(g, share()) : at::Tensor());
    return sums;
  }
  void expect_gradients(const std::vector<at::Tensor>& want) {
    const auto named = net_->named_parameters();
    ASSERT_EQ(named.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      expect_close(named[i].value().grad(), want[i], named[i].key());
      expect_same_bits_everywhere(named[i].value().grad(), named[i].key());
    }
  }

  static int rank() { return world().rank(); }
  static int size() { return world().size(); }

  test::Preparation prepare_;
  Net net_;
  std::shared_ptr<PreparedModel> prepared_ = prepare_(net_.ptr());
};

TEST(Conjugates, OfSomeRanksAreAveragedWithTheOthers) {
  constexpr int rows = 64;  // a large gradient
  // The same on every rank.
  const auto numbers = [](double seed) {
    return at::sin(at::arange(rows * rows, at::kDouble) * 1.7 + seed * 3.1).to(at::kFloat).view({rows, rows});
  };
  auto module = std::make_shared<nn::Module>();
  auto weight = module->register_parameter("weight", at::complex(numbers(1), numbers(2)));
  test::Preparation prepare;
  const auto prepared = prepare(module);
  for (int step = 0; step < 3; ++step) {
    // The gradient of a product with the conjugate is a conjugate view, or the other way round.
    const auto loss = [&](int rank) {
      const auto x = at::complex(numbers(rank + step), numbers(rank + step + 0.5));
      const auto sum = ((rank + step) % 2 == 0 ? weight.conj() * x : weight * x).sum();
      return at::real(sum) + 2 * at::imag(sum);
    };
    auto want = at::zeros({rows, rows}, at::kComplexDouble);
    for (int r = 0; r < world().size(); ++r)
      want += torch::autograd::grad({loss(r)}, {weight})[0].resolve_conj() / world().size();
    weight.mutable_grad().reset();
    loss(world().rank()).backward();
    const auto have = weight.grad().resolve_conj().to(at::kComplexDouble);
    EXPECT_LT((have - want).abs().max().item<double>(), 1e-5) << "step " << step;
  }
}

TEST_F(Gradients, AreTheMean) {
  for (int step = 0; step < 3; ++step) {
    const auto want = together(loss(step));
    zero_grad();
    loss(step).backward();
    expect_gradients(want);
  }
}

TEST_F(Gradients, AreTheSameInEveryRun) {
  loss(1).backward();
  std::vector<at::Tensor> first;
  for (const auto& p : parameters()) first.push_back(p.grad().clone());
  zero_grad();
  loss(1).backward();
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(parameters()[i].grad(), first[i])) << i;
}

TEST_F(Gradients, AreWeightedBySamples) {
  batch({1, 5, 2, 3});
  const auto want = together(loss(1));
  loss(1).backward();
  expect_gradients(want);
}

/// Weights of four ranks; not all of the first three are 0, as the tests have 1, 3 or 4 ranks.
const std::vector<std::vector<double>> weights_of_passes{
    {16384, 3, 700, 1}, {1, 0, 0, 30}, {0.25, 1e-6, 2.5, 0}, {5e8, 7, 1, 2}, {3, 3, 3, 3}};

TEST_F(Gradients, AreTheMeanOverWhatTheProgramCounts) {
  batch({1, 5, 2, 3});  // samples do not count then
  for (const auto& weights : weights_of_passes) {
    const auto want = mean_of_all({weights});
    zero_grad();
    give(weights);
    loss(0).backward();
    expect_gradients(want);
  }
  weight().given.reset();
  const auto want = together(loss(1));
  zero_grad();
  loss(1).backward();
  expect_gradients(want);
}

TEST_F(Gradients, WithWeightsAreTheMeanOverAllPassesOfNoSync) {
  for (const bool in_place : {false, true}) {
    zero_grad();
    {
      const NoSync scope(prepare_.no_sync_depth);
      give(weights_of_passes[3]);
      loss(9).backward();  // is discarded
    }
    net_->zero_grad(!in_place);
    const auto want = mean_of_all(weights_of_passes);
    for (std::size_t i = 0; i < weights_of_passes.size(); ++i) {
      std::optional<NoSync> scope;
      if (i + 1 < weights_of_passes.size()) scope.emplace(prepare_.no_sync_depth);
      give(weights_of_passes[i]);
      loss(static_cast<double>(i)).backward();
    }
    expect_gradients(want);
  }
}

TEST_F(Gradients, WithWeightsAddUpAsAverages) {
  const auto first = together(loss(7));  // without a weight
  const auto want = first + mean_of_all({weights_of_passes[0], weights_of_passes[1]});
  loss(7).backward();
  {
    const NoSync scope(prepare_.no_sync_depth);
    give(weights_of_passes[0]);
    loss(0).backward();
  }
  give(weights_of_passes[1]);
  loss(1).backward();
  expect_gradients(want);

  // A parameter that the pass does not reach keeps its average.
  const auto middle = net_->middle->weight.grad().clone();
  loss(2, false).backward();
  EXPECT_TRUE(at::equal(net_->middle->weight.grad(), middle));
  const auto& out = net_->out->weight;
  const auto before = out.grad().clone();
  const auto more = mean_of_all({weights_of_passes[1]});
  loss(0).backward();
  expect_close(out.grad() - before, more[4], "a further average");
}

TEST_F(Gradients, OfAMeanOverNothingStayAway) {
  const auto file = test::shared_folder() / ("log" + std::to_string(rank()));
  log::write_to(file);
  for (int step = 0; step < 2; ++step) {
    zero_grad();
    give({0, 0, 0, 0});
    (loss(1) * std::numeric_limits<double>::quiet_NaN()).backward();
    for (const auto& p : parameters()) EXPECT_FALSE(p.grad().defined());
  }
  give(weights_of_passes[0]);
  const auto want = mean_of_all({weights_of_passes[0]});
  loss(0).backward();
  give({0, 0, 0, 0});
  loss(1).backward();
  expect_gradients(want);
  net_->zero_grad(/*set_to_none=*/false);
  loss(1, false).backward();  // does not reach all parameters
  for (const auto& p : parameters()) EXPECT_FALSE(p.grad().defined());
  log::write_to({});
  std::ifstream in(file);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const auto warned = text.find("the weight 0 on all ranks");
  EXPECT_NE(warned, std::string::npos) << "on rank " << rank();
  EXPECT_EQ(text.find("the weight 0 on all ranks", warned + 1), std::string::npos) << "said twice";
}

/// The text of the Error (ExitCode::usage) of that backward().
std::string refused(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "no error";
}

TEST_F(Gradients, OfPassesOfWeightZeroLeaveTheZerosOfZeroGrad) {
  give(weights_of_passes[0]);
  loss(1).backward();
  net_->zero_grad(/*set_to_none=*/false);
  give({0, 0, 0, 0});
  {
    const NoSync scope(prepare_.no_sync_depth);
    loss(1).backward();
  }
  give(weights_of_passes[0]);
  loss(0, false).backward();
  const auto& middle = net_->middle->weight.grad();  // which only the pass of weight 0 has reached
  ASSERT_TRUE(middle.defined());
  EXPECT_TRUE(at::equal(middle, at::zeros_like(middle)));
}

TEST_F(Gradients, WithAndWithoutWeightsDoNotMix) {
  {
    const NoSync scope(prepare_.no_sync_depth);
    loss(1).backward();
  }
  give({1, 2, 3, 4});
  EXPECT_NE(refused(loss(2)).find("gradients of batches with and without a weight are added up"), std::string::npos);
  zero_grad();
  loss(2).backward();
  if (size() == 1) return;
  zero_grad();
  if (rank() == 1) weight().given.reset();
  EXPECT_NE(refused(loss(3)).find("was given a weight for some batches of a step only"), std::string::npos);
}

TEST_F(Gradients, BesideHooksOfTheUsersOwn) {
  for (const bool before : {true, false}) {
    Net net;
    if (before) net->in->weight.register_hook([](const at::Tensor& g) { return g * 2; });
    const auto prepared = prepare_(net.ptr());
    if (!before) net->in->weight.register_hook([](const at::Tensor& g) { return g * 2; });
    std::swap(net_, net);
    batch({1, 5, 2, 3});
    const auto want = together(loss(1));  // doubled too: grad() runs the hook as well
    loss(1).backward();
    expect_gradients(want);
    std::swap(net_, net);
  }
}

struct Nothing : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

TEST_F(Gradients, AHookInThePlaceOfTheirOwnIsRefusedByName) {
  torch::autograd::impl::set_post_acc_grad_hooks(net_->middle->weight, std::make_unique<Nothing>());
  try {
    loss(1).backward();
    ADD_FAILURE() << "middle.weight would not be averaged";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_NE(std::string(error.what()).find("middle.weight"), std::string::npos) << error.what();
  }
  for (const auto& p : parameters()) EXPECT_FALSE(p.grad().defined()) << "nothing is changed";
}

TEST_F(Gradients, ANanOfAGhostDoesNotCount) {
  batch({4, 0, 2, 0});
  const auto infinity = std::numeric_limits<double>::infinity();
  const auto want = together(loss(1));
  (share() > 0 ? loss(1) : loss(1) * infinity * 0.0).backward();
  expect_gradients(want);
}

TEST_F(Gradients, NoSyncAddsUpHereAndTheNextPassAverages) {
  const auto mine = local(loss(1));
  const auto want = together(loss(1)) + together(loss(2)) + together(loss(3));
  {
    const NoSync scope(prepare_.no_sync_depth);
    loss(1).backward();
    for (std::size_t i = 0; i < mine.size(); ++i) expect_close(parameters()[i].grad(), mine[i], "this rank's own");
    loss(2).backward();
  }
  loss(3).backward();
  expect_gradients(want);
}

TEST_F(Gradients, APassWithoutAveragingBeginsOnce) {
  int begun = 0;
  prepared_->reducer()->before_each_round([&](bool averages) {
    EXPECT_FALSE(averages);
    ++begun;
    return Reducer::Correction{};
  });
  const NoSync scope(prepare_.no_sync_depth);
  loss(1).backward();
  EXPECT_EQ(begun, 1);
  bool boom = true;
  net_->in->weight.register_hook([&](const at::Tensor&) {
    if (std::exchange(boom, false)) throw std::domain_error("boom");
  });
  EXPECT_THROW(loss(2).backward(), std::domain_error);
  loss(3).backward();
  EXPECT_EQ(begun, 3);
}

TEST_F(Gradients, UnevenPassesAddUpToTheSumOfTheirMeans) {
  const std::vector<std::vector<std::int64_t>> passes{{3, 1, 2, 4}, {5, 0, 0, 1}, {2, 2, 2, 2}, {1, 7, 0, 0}};
  for (const bool sync : {false, true}) {  // without averaging in between, and with
    zero_grad();
    std::vector<at::Tensor> want;
    for (std::size_t i = 0; i < passes.size(); ++i) {
      batch(passes[i]);
      const auto mean = together(loss(static_cast<double>(i)));
      want = want.empty() ? mean : want + mean;
    }
    for (std::size_t i = 0; i < passes.size(); ++i) {
      batch(passes[i]);
      std::optional<NoSync> scope;
      if (!sync && i + 1 < passes.size()) scope.emplace(prepare_.no_sync_depth);
      loss(static_cast<double>(i)).backward();
    }
    expect_gradients(want);
  }
}

TEST_F(Gradients, SeveralLossesAndARetainedGraph) {
  const auto first = together(loss(1)), second = together(loss(2));
  auto a = loss(1), b = loss(2);
  a.backward({}, true);
  b.backward();
  a.backward();
  expect_gradients(first + second + first);
}

TEST_F(Gradients, DoubleBackward) {
  // A penalty on the gradient with respect to the input, as in WGAN-GP: grad() inside, backward() outside.
  const auto penalty = [&] {
    const auto x = values({5, 3}, 1).requires_grad_();
    const auto g = torch::autograd::grad({net_->forward(x).sum()}, {x}, {}, true, true);
    return (g[0].square().sum() + net_->forward(x).sum());
  };
  const auto want = together(penalty());
  penalty().backward();
  expect_gradients(want);

  zero_grad();
  batch({1, 2, 3, 4});
  const auto of_gradients = [&] {  // grad() with respect to parameters is this rank's own, whatever the weight
    const auto g = torch::autograd::grad({loss(1)}, {net_->in->weight}, {}, true, true);
    return g[0].square().sum() + loss(2);
  };
  const auto weighted = together(of_gradients());
  of_gradients().backward();
  expect_gradients(weighted);
}

TEST_F(Gradients, MayBePartOfALoss) {
  // The loss is the sum of squares of the averaged gradients. Its derivative flows back through the gradients of this
  // rank only.
  for (const bool uneven : {false, true}) {
    if (uneven) batch({1, 5, 2, 3});
    const auto first = together(loss(1));
    const auto own = torch::autograd::grad({loss(1)}, parameters(), {}, true, true);
    at::Tensor product = at::zeros({});
    for (std::size_t i = 0; i < own.size(); ++i) product = product + (own[i] * (2 * first[i]).to(at::kFloat)).sum();
    const auto want = together(product);

    zero_grad();
    loss(1).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    expect_gradients(first);
    at::Tensor squares = at::zeros({});
    for (const auto& p : parameters()) {
      ASSERT_TRUE(p.grad().requires_grad());
      squares = squares + p.grad().square().sum();
    }
    for (auto& p : parameters()) p.mutable_grad() = at::Tensor();
    weight() = {.total = size()};  // the averages are weighted already
    squares.backward();
    expect_gradients(want);
  }
}

TEST_F(Gradients, OfAParameterThatSomeRanksUse) {
  const bool mine = rank() == 0;  // the middle layer counts on rank 0 alone
  std::vector<at::Tensor> want;
  const auto here = local(loss(1, mine));
  for (std::size_t i = 0; i < here.size(); ++i)
    want.push_back(test::mean_over_ranks(here[i].defined() ? here[i] : at::zeros_like(parameters()[i])));
  loss(1, mine).backward();
  expect_gradients(want);
  loss(1, mine).backward();  // onto the averages
  for (auto& w : want) w = w * 2;
  expect_gradients(want);
}

TEST_F(Gradients, OfAParameterThatNoRankUsesStayAway) {
  loss(1, false).backward();
  EXPECT_FALSE(net_->middle->weight.grad().defined());
  EXPECT_TRUE(net_->in->weight.grad().defined());
  const auto before = net_->middle->weight.detach().clone();
  torch::optim::SGD(parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1)).step();
  EXPECT_TRUE(at::equal(net_->middle->weight, before)) << "neither momentum nor decay has moved it";

  net_->middle->weight.mutable_grad() = at::full({width, width}, 7.0f);
  loss(1, false).backward();
  EXPECT_TRUE(at::equal(net_->middle->weight.grad(), at::full({width, width}, 7.0f)))
      << "one that is there is left alone";
}

TEST_F(Gradients, OfAParameterThatOnlyAGhostUsesStayAway) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(size()), 2);
  samples.back() = 0;
  if (size() == 1) samples[0] = 2;
  batch(samples);
  const bool ghost = share() == 0;
  loss(1, ghost).backward();
  EXPECT_FALSE(net_->middle->weight.grad().defined());
  expect_same_bits_everywhere(net_->in->weight.grad(), "in.weight");
}

TEST_F(Gradients, PendingOnesAreAveragedThoughTheLastPassDidNotReachThem) {
  const auto want = together(loss(1));
  {
    const NoSync scope(prepare_.no_sync_depth);
    loss(1).backward();
  }
  loss(2, false).backward();
  expect_close(net_->middle->weight.grad(), want[2], "middle.weight");
}

TEST_F(Gradients, FrozenAndUnfrozen) {
  net_->middle->weight.set_requires_grad(false);
  loss(1).backward();
  EXPECT_FALSE(net_->middle->weight.grad().defined());
  net_->middle->weight.set_requires_grad(true);
  zero_grad();
  const auto want = together(loss(2));
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(Gradients, UnfrozenAfterItWasPreparedFrozen) {
  Net net;
  net->middle->weight.set_requires_grad(false);
  const auto prepared = prepare_(net.ptr());
  std::swap(net_, net);
  loss(1).backward();
  net_->middle->weight.set_requires_grad(true);
  zero_grad();
  const auto want = together(loss(2));
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(Gradients, ZeroedInPlace) {
  const auto want = together(loss(2));
  loss(1).backward();
  net_->zero_grad(/*set_to_none=*/false);
  const auto before = net_->in->weight.grad();
  loss(2).backward();
  expect_gradients(want);
  EXPECT_TRUE(net_->in->weight.grad().is_same(before));
}

TEST_F(Gradients, AnExceptionInBackwardLeavesTheNextOneWhole) {
  bool boom = true;
  net_->in->weight.register_hook([&](const at::Tensor&) {
    if (boom) throw std::domain_error("boom");
  });
  EXPECT_THROW(loss(1, rank() == 0).backward(), std::domain_error) << "buckets on their way differ by rank";
  boom = false;
  zero_grad();
  const auto want = together(loss(2));
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(Gradients, ARankThatGoesOnAfterAnExceptionIsAnErrorOnTheOthers) {
  const auto want = together(loss(2));
  bool boom = rank() == 0;
  net_->in->weight.register_hook([&](const at::Tensor&) {
    if (std::exchange(boom, false)) throw std::domain_error("boom");
  });
  if (rank() == 0)
    EXPECT_THROW(loss(1).backward(), std::domain_error);
  else
    EXPECT_THROW(loss(1).backward(), Error);
  zero_grad();
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(Gradients, ARankWithoutMemoryForACopyIsAnErrorOnTheOthers) {
  if (size() == 1 || test::averaging_ranks().topology().num_nodes == size() || test::by("buckets") || test::by("hook"))
    GTEST_SKIP() << "nothing is shared";
  const auto want = together(loss(2));
  loss(0).backward();
  const auto kept = net_->middle->weight.grad();  // its memory cannot be used again
  zero_grad();
  const int last = size() - 1;
  if (rank() == last) {
    // As if /dev/shm were full.
    const test::IoError full("posix_fallocate", " (deleted)", ENOSPC);
    EXPECT_THROW(loss(1).backward(), Error);
    EXPECT_GT(full.count(), 0);
  } else {
    EXPECT_THROW(loss(1).backward(), Error);
  }
  zero_grad();
  loss(2).backward();
  expect_gradients(want);
}

TEST_F(Gradients, OfAParameterInOtherMemory) {
  const auto wider = values({width, 2 * width}, 3);
  for (const auto& other : {wider.slice(1, 0, 2 * width, 2), wider.narrow(1, 0, width), wider.narrow(1, 0, width).t(),
                            wider.narrow(1, 0, 1).expand({width, width}), values({width, width}, 4)}) {
    net_->middle->weight.set_data(other);
    for (int step = 0; step < 2; ++step) {
      const auto want = together(loss(step));
      zero_grad();
      loss(step).backward();
      expect_gradients(want);
    }
  }
}

TEST_F(Gradients, MadeElsewhereAreAveragedAllTheSame) {
  // Gradients set by hand before backward() adds to them, including the large one.
  const auto& weight = net_->middle->weight;
  const auto want = test::mean_over_ranks(local(loss(1))[2] + values(weight.sizes(), 3));
  for (int step = 0; step < 2; ++step) {
    zero_grad();
    weight.mutable_grad() = values(weight.sizes(), 3);
    loss(1).backward();
    expect_close(weight.grad(), want, "middle.weight");
    expect_same_bits_everywhere(weight.grad(), "middle.weight");
  }
}

TEST_F(Gradients, StayWhatTheyAreWhileTheNextOnesAreMade) {
  loss(1).backward();
  const auto kept = net_->middle->weight.grad();
  const auto values_then = kept.clone();
  for (int step = 2; step < 5; ++step) {
    const auto want = together(loss(step));
    zero_grad();
    loss(step).backward();
    expect_gradients(want);
  }
  EXPECT_TRUE(at::equal(kept, values_then)) << "somebody held on to it";
}

TEST_F(Gradients, OutliveTheReducer) {
  prepared_.reset();
  const auto want = local(loss(1));
  loss(1).backward();
  for (std::size_t i = 0; i < want.size(); ++i) expect_close(parameters()[i].grad(), want[i], "this rank's own");
}

TEST_F(Gradients, OfTwoModelsInOneBackward) {
  // As a generator and a discriminator are: the ranks reach different parts of the second, so that its buckets start
  // before those of the first on one rank and after them on another.
  Net judge;
  const auto judged = prepare_(judge.ptr());
  const bool whole = rank() % 2 == 0;
  const auto both = [&] {
    const auto made = net_->forward(values({5, 3}, 1));
    return judge->forward(at::cat({made, made.narrow(1, 0, 1)}, 1), whole).square().mean();
  };
  const auto want = together(both());
  const auto of_judge = torch::autograd::grad({both()}, {judge->in->weight});
  const auto want_judge = test::mean_over_ranks(of_judge[0]);
  for (int step = 0; step < 3; ++step) {
    zero_grad();
    judge->zero_grad();
    both().backward();
    expect_gradients(want);
    expect_close(judge->in->weight.grad(), want_judge, "of the second model");
    expect_same_bits_everywhere(judge->middle->weight.grad(), "used on even ranks");
  }
}

/// True if the address is in memory that other processes map, too.
bool is_shared(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at >= begin && at < end) return line.find("/dev/shm/") != std::string::npos;
  }
  return false;
}

TEST(GradientsOf, LargeLayersAreBornInSharedMemory) {
  if (test::averaging_ranks().topology().num_nodes == world().size() || test::by("buckets") || test::by("hook"))
    GTEST_SKIP() << "nothing is shared";
  nn::Sequential net(nn::Conv2d(32, 32, 3), nn::ReLU(), nn::Conv2d(32, 64, 3), nn::Flatten(), nn::Linear(64, width));
  const auto prepared = test::Preparation()(net.ptr());
  const auto loss = [&] { return net->forward(values({2, 32, 5, 5}, 1)).square().mean(); };
  for (int step = 0; step < 3; ++step) {
    const auto want = test::mean_over_ranks(torch::autograd::grad({loss()}, {net->parameters()[0]})[0]);
    net->zero_grad();
    loss().backward();
    expect_close(net->parameters()[0].grad(), want, "the first layer");
    for (const auto& p : net->named_parameters()) {
      if (p.value().dim() < 2) continue;
      EXPECT_TRUE(is_shared(p.value().grad().const_data_ptr())) << p.key() << ", step " << step;
    }
  }
}

TEST(SharedExchange, KeepsTheMemoryOfGradientsUntilTheRoundHasEnded) {
  const auto parameter = at::zeros({width, width}).requires_grad_();
  const auto exchange = SharedExchange::make({parameter}, test::averaging_ranks().duplicate(), false);
  if (!exchange) GTEST_SKIP() << "one rank";
  for (const auto arrival : {Arrival::in_backward, Arrival::at_once, Arrival::left}) {
    parameter.mutable_grad().reset();
    (parameter * values({width, width}, 1)).sum().backward();
    exchange->begin(arrival, 0, 0);
    exchange->add(0, parameter.grad(), ParameterUse::used);
    EXPECT_TRUE(exchange->holds(0));
    exchange->finish();
    EXPECT_FALSE(exchange->holds(0));
  }
}

TEST(ModelExchanges, StayAsTheyAreIfNewOnesCannotBeMade) {
  nn::Sequential net(nn::Linear(2, 2), nn::Linear(2, 2));
  for (auto& p : net->ptr(1)->parameters()) p.set_requires_grad(false);
  const ModelParameters parameters(net.ptr());
  bool fails = false;
  const auto make = [&](const std::vector<at::Tensor>& some) -> std::unique_ptr<Exchange> {
    if (fails) throw Error(ExitCode::retry, "making an exchange", "there is no memory", "Try again");
    return std::make_unique<AloneExchange>(some.size());
  };
  ModelExchanges exchanges(parameters, make, make);
  for (auto& p : net->ptr(1)->parameters()) p.set_requires_grad(true);
  fails = true;
  EXPECT_THROW(exchanges.extend(exchanges.unfrozen()), Error);
  EXPECT_EQ(exchanges.unfrozen().size(), 2u);
  fails = false;
  exchanges.extend(exchanges.unfrozen());
  EXPECT_TRUE(exchanges.unfrozen().empty());
  EXPECT_EQ(exchanges.dense_parameters().size(), 4u);
}

TEST(GradientsOf, LayersInAnotherOrderThanTheyStandIn) {
  // Rank 0 determines the order; the other ranks compute in other orders.
  constexpr std::size_t layers = 5;
  for (const bool alike : {true, false}) {
    auto module = std::make_shared<nn::Module>();
    std::vector<at::Tensor> weights;
    for (std::size_t i = 0; i < layers; ++i)
      weights.push_back(module->register_parameter("w" + std::to_string(i), values({width, width}, 1.0 * i) * 0.1));
    const auto bias = module->register_parameter("bias", values({width}, 7));
    const auto prepared = test::Preparation()(module);
    const std::size_t first = alike ? 2 : 2 + static_cast<std::size_t>(world().rank());
    const auto loss = [&](double seed) {
      auto x = values({4, width}, seed);
      for (std::size_t i = 0; i < layers; ++i) x = at::tanh(x.mm(weights[(first + 3 * i) % layers]) + bias);
      return x.square().mean();
    };
    for (int step = 0; step < 4; ++step) {
      auto all = weights;
      all.push_back(bias);
      const auto local = torch::autograd::grad({loss(step)}, all);
      module->zero_grad();
      loss(step).backward();
      for (std::size_t i = 0; i < all.size(); ++i) {
        expect_close(all[i].grad(), test::mean_over_ranks(local[i]), std::to_string(i));
        expect_same_bits_everywhere(all[i].grad(), std::to_string(i));
      }
    }
  }
}

TEST(GradientsOf, SharedParameters) {
  auto module = std::make_shared<nn::Module>();
  const auto w = module->register_parameter("w", values({3, 3}, 1));
  const auto again = module->register_parameter("again", w);
  ASSERT_EQ(module->parameters().size(), 2u);
  const auto prepared = test::Preparation()(module);
  const auto loss = [&] { return at::tanh(values({2, 3}, 5).mm(w)).mm(again).square().sum(); };
  const auto want = test::mean_over_ranks(torch::autograd::grad({loss()}, {w})[0]);
  loss().backward();
  expect_close(w.grad(), want, "w");
  expect_same_bits_everywhere(w.grad(), "w");
}

TEST(GradientsOf, SeveralTypesWithWeights) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
    auto module = std::make_shared<nn::Module>();
    const auto small = module->register_parameter("small", at::zeros({5}, type)),
               large = module->register_parameter("large", at::zeros({64, 64}, type));
    test::Preparation prepare;
    const auto prepared = prepare(module);
    const auto rank = static_cast<std::size_t>(world().rank());
    const double exact = type == at::kDouble ? 1e-13 : type == at::kBFloat16 ? 0.02 : type == at::kHalf ? 3e-3 : 1e-6;
    // The product of weight and gradient is above the largest half number.
    for (const auto& weights : {std::vector<double>{30000, 9000.125, 70000, 41}, {3e7, 1e7, 0, 1e6}, {9000, 3, 0, 1}}) {
      prepare.weight->local = 64;
      prepare.weight->global = 64 * world().size();
      prepare.weight->given = weights[rank];
      double all = 0;
      for (int r = 0; r < world().size(); ++r) all += weights[static_cast<std::size_t>(r)];
      module->zero_grad();
      at::Tensor loss;
      for (const auto& p : {small, large}) {
        const auto x = values(p.sizes(), 1).to(at::kDouble).mul(4).to(type);
        const auto part = at::real(p * x).sum();
        loss = loss.defined() ? loss + part.to(at::kDouble) : part.to(at::kDouble);
      }
      loss.backward();
      for (const auto& p : {small, large}) {
        const auto own = values(p.sizes(), 1).to(at::kDouble).mul(4).to(type).to(at::kComplexDouble);
        const auto want = test::weighted_sum(at::real(own), weights[rank] / all);
        const auto have = at::real(p.grad().to(at::kComplexDouble));
        EXPECT_LE((have - want).abs().max().item<double>(), 4 * exact) << type << ", weight " << weights[0];
        expect_same_bits_everywhere(p.grad(), "a gradient");
      }
    }
  }
}

TEST(GradientsOf, SeveralTypesAndLayouts) {
  auto module = std::make_shared<nn::Module>();
  std::vector<at::Tensor> all{
      module->register_parameter("float", values({3, 4}, 1)),
      module->register_parameter("double", values({5}, 2).to(at::kDouble)),
      module->register_parameter("bfloat16", values({6}, 3).to(at::kBFloat16)),
      module->register_parameter("turned", values({3, 4}, 4).t()),
      module->register_parameter("scalar", values({}, 5)),
      module->register_parameter("nothing", values({0, 3}, 6)),
      module->register_parameter("images", values({2, 3, 4, 5}, 7).contiguous(at::MemoryFormat::ChannelsLast)),
      module->register_parameter("half", values({7}, 10).to(at::kHalf)),
      module->register_parameter("complex", at::complex(values({3, 2}, 11), values({3, 2}, 12))),
      module->register_parameter("complex double",
                                 at::complex(values({2}, 13), values({2}, 14)).to(at::kComplexDouble)),
      module->register_parameter("conjugate", at::complex(values({2}, 15), values({2}, 16)).conj()),
      module->register_parameter("every second", values({4, 6}, 17).slice(1, 0, 6, 2)),
      module->register_parameter("many of every second", values({width, 2 * width}, 18).slice(1, 0, 2 * width, 2)),
      module->register_parameter("expanded", values({1, 3}, 19).expand({4, 3})),
      module->register_parameter("much expanded", values({width, 1}, 20).expand({width, width})),
  };
  const auto frozen = module->register_parameter("frozen", values({3}, 8), false);
  const auto count = module->register_parameter("count", at::arange(3), false);
  const auto prepared = test::Preparation()(module);
  const auto loss = [&] {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (const auto& p : all) {
      const auto wide = p.to(p.is_complex() ? at::kComplexDouble : at::kDouble);
      sum = sum + (wide * values(p.sizes(), 9).to(at::kDouble)).abs().square().sum();
    }
    return sum;
  };
  const auto local = torch::autograd::grad({loss()}, all);
  loss().backward();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto parts = [](const at::Tensor& t) {
      return (t.is_complex() ? at::view_as_real(t.resolve_conj()) : t).to(at::kDouble);
    };
    const auto want = test::mean_over_ranks(parts(local[i]));
    const bool coarse = all[i].element_size() == 2;
    const double tolerance = coarse ? 2e-2 : 1e-5;
    EXPECT_TRUE(at::allclose(parts(all[i].grad()), want, tolerance, tolerance)) << i;
    expect_same_bits_everywhere(all[i].grad(), std::to_string(i));
  }
  expect_same_bits_everywhere(frozen, "frozen");
  EXPECT_FALSE(frozen.grad().defined() || frozen.requires_grad() || count.grad().defined());
}

}  // namespace
}  // namespace muster::detail::gradients::gradients_test
