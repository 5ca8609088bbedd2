// Batch-norm over the ranks: a batch that is split equals one rank with all of it.
#include "muster/sync_batch_norm.hpp"

#include "muster/error.hpp"
#include "muster/exported.hpp"
#include "muster/mixed_precision.hpp"
#include "muster/recompute.hpp"
#include "muster/script.hpp"
#include "support/exported_file.hpp"
#include "support/folder.hpp"
#include "support/job.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace muster::sync_batch_norm_test {
namespace {

namespace nn = torch::nn;
using test::world;

at::Tensor values(at::IntArrayRef sizes, double seed, at::ScalarType type = at::kDouble) {
  return at::sin(at::arange(at::empty(sizes).numel(), at::kDouble) * 1.7 + seed * 3.1).to(type).view(sizes);
}

/// Samples of each rank.
using Split = std::vector<std::int64_t>;
Split even() { return Split(static_cast<std::size_t>(world().size()), 3); }
Split uneven() {
  Split split;
  for (int r = 0; r < world().size(); ++r) split.push_back(1 + 2 * (r % 2) + r);
  split[0] += 2;
  return split;
}
std::int64_t sum_of(const Split& split, int ranks = world().size()) {
  std::int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) sum += split[static_cast<std::size_t>(r)];
  return sum;
}
at::Tensor own_part(const at::Tensor& whole, const Split& split) {
  return whole.narrow(0, sum_of(split, world().rank()), split[static_cast<std::size_t>(world().rank())]);
}

/// Prepared for a batch of that split.
struct Prepared : test::Preparation {
  void weigh(const Split& split) {
    weight->local = split[static_cast<std::size_t>(world().rank())];
    weight->global = sum_of(split);
  }
  double share() const { return weight->relative() / world().size(); }
};

void expect_close(const at::Tensor& have, const at::Tensor& want, const std::string& what) {
  const bool doubles = want.scalar_type() == at::kDouble;
  EXPECT_TRUE(have.sizes() == want.sizes() && at::allclose(have, want, doubles ? 1e-9 : 2e-5, doubles ? 1e-11 : 1e-5))
      << what << ": have\n"
      << have << "\nwant\n"
      << want;
}

/// Two layers with a batch-norm between them, of one kind or the other.
template <class Norm>
struct NetImpl : nn::Module {
  explicit NetImpl(const nn::BatchNormOptions& options) : norm(options) {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
    double seed = 0;
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(values(parameter.sizes(), ++seed));
  }
  /// `shape`: of a sample, as the batch-norm sees it.
  at::Tensor forward(const at::Tensor& x, at::IntArrayRef shape) {
    auto sizes = shape.vec();
    sizes.insert(sizes.begin(), x.size(0));
    return out->forward(torch::tanh(norm->forward(in->forward(x).view(sizes))).flatten(1));
  }
  nn::Linear in{3, 24};
  Norm norm;
  nn::Linear out{24, 2};
};

template <class Norm, class Plain>
void expect_as_one_rank(const nn::BatchNormOptions& options, at::IntArrayRef shape, const Split& split,
                        at::ScalarType type, const std::string& what) {
  Prepared prepare;
  prepare.weigh(split);
  auto net = std::make_shared<NetImpl<Norm>>(options);
  NetImpl<Plain> whole(options);
  net->to(type);
  whole.to(type);
  const auto prepared = prepare(net);
  for (int step = 0; step < 2; ++step) {
    const auto all = values({sum_of(split), 3}, 10 + step, type), target = values({sum_of(split), 2}, 20 + step, type);
    const auto x = own_part(all, split).clone().requires_grad_(), x_whole = all.clone().requires_grad_();
    net->zero_grad();
    whole.zero_grad();
    const auto y = net->forward(x, shape), y_whole = whole.forward(x_whole, shape);
    expect_close(y, own_part(y_whole, split), what + ", outputs");
    (y - own_part(target, split)).square().mean().backward();
    (y_whole - target).square().mean().backward();
    expect_close(x.grad() * prepare.share(), own_part(x_whole.grad(), split), what + ", gradient of the input");
    const auto want = whole.named_parameters();
    for (const auto& item : net->named_parameters())
      expect_close(item.value().grad(), want[item.key()].grad(), what + ", gradient of " + item.key());
  }
  const auto want = whole.named_buffers();
  EXPECT_EQ(net->named_buffers().keys(), want.keys());
  for (const auto& item : net->named_buffers()) {
    expect_close(item.value(), want[item.key()], what + ", " + item.key());
    test::expect_same_bits_everywhere(item.value(), what + ", " + item.key());
  }
  net->eval();
  whole.eval();
  if (options.track_running_stats()) {
    const auto x = values({2, 3}, world().rank(), type);
    expect_close(net->forward(x, shape), whole.forward(x, shape), what + ", in evaluation");
  }
}

TEST(SyncBatchNorm, ASplitBatchIsOneBatch) {
  for (const auto type : {at::kDouble, at::kFloat})
    for (const auto& [split, kind] : {std::pair(even(), "even"), std::pair(uneven(), "uneven")}) {
      const auto what = std::string(kind) + (type == at::kFloat ? " floats" : " doubles");
      expect_as_one_rank<SyncBatchNorm1d, nn::BatchNorm1d>(24, {24}, split, type, what + ", 2 dimensions");
      expect_as_one_rank<SyncBatchNorm1d, nn::BatchNorm1d>(6, {6, 4}, split, type, what + ", 3 dimensions");
      expect_as_one_rank<SyncBatchNorm2d, nn::BatchNorm2d>(4, {4, 2, 3}, split, type, what + ", 4 dimensions");
      expect_as_one_rank<SyncBatchNorm3d, nn::BatchNorm3d>(3, {3, 2, 2, 2}, split, type, what + ", 5 dimensions");
    }
}

TEST(SyncBatchNorm, TakesValuesFarFromZero) {
  const auto split = uneven();
  Prepared prepare;
  prepare.weigh(split);
  for (const auto& [offset, deviation] : {std::pair(1e6, 0.01), std::pair(1e8, 1.0)}) {
    const auto net = std::make_shared<SyncBatchNorm1dImpl>(4);
    net->to(at::kDouble);
    const auto prepared = prepare(net);
    nn::BatchNorm1d whole(4);
    whole->to(at::kDouble);
    const auto all = values({sum_of(split), 4}, 3, at::kDouble) * deviation + offset;
    const auto y = net->forward(own_part(all, split)), want = own_part(whole->forward(all), split);
    EXPECT_TRUE(at::allclose(y, want, 1e-5, 1e-5)) << y << want;
    EXPECT_TRUE(at::allclose(net->running_var, whole->running_var, 1e-5)) << net->running_var << whole->running_var;
  }
}

TEST(SyncBatchNorm, WithItsOptions) {
  using Options = nn::BatchNormOptions;
  for (const auto& [options, what] : {std::pair(Options(6).affine(false), "without weights"),
                                      std::pair(Options(6).momentum(std::nullopt), "averaged"),
                                      std::pair(Options(6).momentum(0.5).eps(0.1), "momentum and eps"),
                                      std::pair(Options(6).track_running_stats(false), "without running statistics")})
    expect_as_one_rank<SyncBatchNorm1d, nn::BatchNorm1d>(options, {6, 4}, uneven(), at::kDouble, what);
}

TEST(SyncBatchNorm, ABatchMayBeEmptyAndInAnyOrderOfMemory) {
  auto split = uneven();
  if (world().size() > 1) split.back() = 0;
  expect_as_one_rank<SyncBatchNorm1d, nn::BatchNorm1d>(24, {24}, split, at::kDouble, "a rank without samples");
  for (const bool channels_last : {false, true}) {
    const Prepared prepare;  // all ranks count the same
    SyncBatchNorm2d norm(5);
    nn::BatchNorm2d whole(5);
    norm->to(at::kDouble);
    whole->to(at::kDouble);
    const auto prepared = prepare(norm.ptr());
    const auto format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    const auto all = values({sum_of(split), 5, 2, 3}, 1);
    const auto x = own_part(all, split).contiguous(format).requires_grad_();
    const auto x_whole = all.contiguous(format).requires_grad_();
    const auto y = norm->forward(x), y_whole = whole->forward(x_whole);
    expect_close(y, own_part(y_whole, split), "outputs");
    const auto loss_of = [](const at::Tensor& made) { return torch::tanh(made + made.mul(3).sin()).sum(); };
    loss_of(y).backward();
    (loss_of(y_whole) / world().size()).backward();
    expect_close(x.grad() / world().size(), own_part(x_whole.grad(), split), "gradient of the input");
    expect_close(norm->weight.grad(), whole->weight.grad(), "gradient of the weight");
    expect_close(norm->bias.grad(), whole->bias.grad(), "gradient of the bias");
    expect_close(norm->running_var, whole->running_var, "running_var");
  }
}

TEST(SyncBatchNorm, ABatchOfWeightZeroDoesNotCount) {
  if (world().size() == 1) return;
  auto split = uneven();
  split.back() = 0;
  const bool counts = split[static_cast<std::size_t>(world().rank())] > 0;
  Prepared prepare;
  prepare.weigh(split);
  auto net = std::make_shared<NetImpl<SyncBatchNorm1d>>(24);
  NetImpl<nn::BatchNorm1d> whole(24);
  net->to(at::kDouble);
  whole.to(at::kDouble);
  const auto prepared = prepare(net);
  const auto all = values({sum_of(split), 3}, 1);
  const auto y = net->forward(counts ? own_part(all, split) : at::full({2, 3}, NAN, at::kDouble), {24});
  const auto y_whole = whole.forward(all, {24});
  if (counts) expect_close(y, own_part(y_whole, split), "outputs");
  y.square().mean().backward();
  y_whole.square().mean().backward();
  const auto want = whole.named_parameters();
  for (const auto& item : net->named_parameters())
    expect_close(item.value().grad(), want[item.key()].grad(), "gradient of " + item.key());
  for (const auto& item : net->named_buffers())
    expect_close(item.value(), whole.named_buffers()[item.key()], item.key());
}

TEST(SyncBatchNorm, AStepInWhichNoBatchCountsChangesNothing) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has torch's own batch-norm";
  for (const auto type : {at::kFloat, at::kDouble}) {
    SCOPED_TRACE(type);
    Prepared prepare;
    auto net = std::make_shared<NetImpl<SyncBatchNorm1d>>(24);
    NetImpl<nn::BatchNorm1d> whole(24);
    net->to(type);
    whole.to(type);
    const auto prepared = prepare(net);
    prepare.weight->given = 0;
    for (const double factor : {1.0, std::numeric_limits<double>::quiet_NaN()}) {
      const auto x = own_part(values({sum_of(even()), 3}, 2, type), even()).clone().requires_grad_();
      const auto y = net->forward(x, {24});
      EXPECT_TRUE(at::isfinite(y).all().item<bool>());
      (y.square().mean() * factor).backward();
      EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x)));
      for (const auto& item : net->named_parameters()) EXPECT_FALSE(item.value().grad().defined()) << item.key();
      for (const auto& item : net->named_buffers())
        EXPECT_TRUE(at::equal(item.value(), whole.named_buffers()[item.key()])) << item.key();
    }
    // The next step is the first that counts.
    prepare.weight->given = 3;
    const auto all = values({sum_of(even()), 3}, 1, type);
    net->forward(own_part(all, even()), {24}).square().mean().backward();
    whole.forward(all, {24}).square().mean().backward();
    const auto want = whole.named_parameters();
    for (const auto& item : net->named_parameters())
      expect_close(item.value().grad(), want[item.key()].grad(), "gradient of " + item.key());
    for (const auto& item : net->named_buffers())
      expect_close(item.value(), whole.named_buffers()[item.key()], item.key());
  }
}

TEST(SyncBatchNorm, GradientsMayBeAddedUp) {
  Prepared prepare;
  auto net = std::make_shared<NetImpl<SyncBatchNorm1d>>(24);
  NetImpl<nn::BatchNorm1d> whole(24);
  net->to(at::kDouble);
  whole.to(at::kDouble);
  const auto prepared = prepare(net);
  for (const auto& split : {uneven(), even()}) {
    prepare.weigh(split);
    const auto all = values({sum_of(split), 3}, 1);
    const auto last = split == even();
    if (!last) ++*prepare.no_sync_depth;
    net->forward(own_part(all, split), {24}).square().mean().backward();
    if (!last) --*prepare.no_sync_depth;
    whole.forward(all, {24}).square().mean().backward();
  }
  const auto want = whole.named_parameters();
  for (const auto& item : net->named_parameters())
    expect_close(item.value().grad(), want[item.key()].grad(), "gradient of " + item.key());
}

TEST(SyncBatchNorm, IsOrdinaryWhereNothingIsPrepared) {
  const auto x = values({3 + world().rank(), 4}, world().rank(), at::kFloat);
  const auto expect_ordinary = [&](SyncBatchNorm1d& norm, const std::string& what) {
    nn::BatchNorm1d plain(4);
    norm->reset_running_stats();
    EXPECT_TRUE(at::equal(norm->forward(x), plain->forward(x))) << what;
    EXPECT_TRUE(at::equal(norm->running_var, plain->running_var)) << what;
  };
  SyncBatchNorm1d norm(4);
  expect_ordinary(norm, "never prepared");
  {
    Prepared prepare;
    prepare.options.parallel = Parallel::none;
    const auto prepared = prepare(norm.ptr());
    expect_ordinary(norm, "not in parallel");
  }
  {
    const Prepared prepare;
    const auto prepared = prepare(norm.ptr());
    norm->forward(x);
    SyncBatchNorm1d copy(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(norm->clone()));
    expect_ordinary(copy, "a copy of a prepared one");
  }
  expect_ordinary(norm, "after its session");
  EXPECT_NE(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(norm->clone()), nullptr);
  std::ostringstream shown;
  shown << norm;
  EXPECT_NE(shown.str().find("muster::SyncBatchNorm1d(4"), std::string::npos) << shown.str();
  EXPECT_THROW(norm->forward(at::ones({2, 4, 1, 1})), c10::Error);
}

TEST(SyncBatchNorm, TakesSixteenBits) {
  const auto split = uneven();
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    Prepared prepare;
    prepare.weigh(split);
    SyncBatchNorm2d norm(4);
    nn::BatchNorm2d plain(4);
    const auto prepared = prepare(norm.ptr());
    const auto all = values({sum_of(split), 4, 2, 2}, 1, type);
    const auto x = own_part(all, split).clone().requires_grad_(), x_whole = all.to(at::kFloat).requires_grad_();
    const auto y = norm->forward(x), y_whole = plain->forward(x_whole);
    EXPECT_EQ(y.scalar_type(), type);
    EXPECT_TRUE(at::allclose(y.to(at::kFloat), own_part(y_whole, split), 0.02, 0.02));
    y.to(at::kFloat).pow(3).mean().backward();
    y_whole.pow(3).mean().backward();
    EXPECT_EQ(x.grad().scalar_type(), type);
    EXPECT_TRUE(at::allclose(x.grad().to(at::kFloat) * prepare.share(), own_part(x_whole.grad(), split), 0.05, 0.01));
    EXPECT_EQ(norm->weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::allclose(norm->running_var, plain->running_var, 1e-5, 1e-6));
  }
  Prepared prepare;
  nn::Sequential net(nn::Linear(3, 4), SyncBatchNorm1d(4));
  const auto prepared = prepare(net.ptr());
  at::Tensor loss;
  {
    const Autocast scope(at::kCPU);
    loss = net->forward(values({3, 3}, world().rank(), at::kFloat)).to(at::kFloat).square().mean();
  }
  loss.backward();
  EXPECT_EQ(net->parameters()[0].grad().scalar_type(), at::kFloat);
}

TEST(SyncBatchNorm, BranchesMayHaveOtherGraphsOnOtherRanks) {
  Prepared prepare;
  auto net = std::make_shared<nn::Module>();
  const auto a = net->register_module("a", SyncBatchNorm1d(4)), b = net->register_module("b", SyncBatchNorm1d(4));
  nn::BatchNorm1d a_whole(4), b_whole(4);
  net->to(at::kDouble);
  a_whole->to(at::kDouble);
  b_whole->to(at::kDouble);
  const auto prepared = prepare(net);
  const auto split = even();
  const auto all = values({sum_of(split), 4}, 1);
  const auto x = own_part(all, split).clone().requires_grad_(), x_whole = all.clone().requires_grad_();
  auto of_a = a->forward(x), of_b = b->forward(x.square());
  if (world().rank() % 2 == 1) {
    for (int i = 0; i < 5; ++i) of_a = of_a * 1;
    (of_b.pow(3) + of_a.square()).mean().backward();
  } else {
    (of_a.square() + of_b.pow(3)).mean().backward();
  }
  (a_whole->forward(x_whole).square() + b_whole->forward(x_whole.square()).pow(3)).mean().backward();
  expect_close(x.grad() * prepare.share(), own_part(x_whole.grad(), split), "gradient of the input");
}

TEST(SyncBatchNorm, RanksInDifferentLayersAreTold) {
  if (world().size() == 1) return;
  Prepared prepare;
  auto net = std::make_shared<nn::Module>();
  auto a = net->register_module("a", SyncBatchNorm1d(4)), b = net->register_module("b", SyncBatchNorm1d(4));
  const auto prepared = prepare(net);
  try {
    (world().rank() == 0 ? a : b)->forward(at::ones({2, 4}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("different SyncBatchNorms"), std::string::npos) << error.what();
  }
}

TEST(SyncBatchNorm, OneValueIsTooFew) {
  Split split(static_cast<std::size_t>(world().size()), 0);
  split[0] = 1;
  if (world().size() == 1) return;
  Prepared prepare;
  prepare.weigh(split);
  SyncBatchNorm1d norm(4);
  const auto prepared = prepare(norm.ptr());
  EXPECT_THROW(norm->forward(at::ones({1, 4})), Error);
  prepare.weight->given = world().rank();  // those that count are empty, and rank 0's does not count
  EXPECT_THROW(norm->forward(at::ones({world().rank() == 0 ? 2 : 0, 4})), Error);
}

TEST(SyncBatchNorm, StandsInARecomputedBlock) {
  const auto split = uneven();
  std::vector<std::vector<at::Tensor>> found;
  for (const bool recomputes : {false, true}) {
    Prepared prepare;
    prepare.weigh(split);
    nn::Sequential net(nn::Linear(3, 4), SyncBatchNorm1d(4), nn::Tanh(), nn::Linear(4, 4), SyncBatchNorm1d(4));
    {
      double seed = 0;
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.copy_(values(parameter.sizes(), ++seed));
    }
    const auto prepared = prepare(net.ptr());
    const auto x = own_part(values({sum_of(split), 3}, 1, at::kFloat), split);
    (recomputes ? recompute(net, x) : net->forward(x)).pow(3).mean().backward();
    auto& all = found.emplace_back();
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad());
    for (const auto& buffer : net->buffers()) all.push_back(buffer);
  }
  for (std::size_t i = 0; i < found[0].size(); ++i) EXPECT_TRUE(at::equal(found[1][i], found[0][i])) << i;
}

// --- ModelOptions::sync_batch_norm ---

struct Layers : nn::Module {
  Layers() {
    register_module("first", first);
    register_module("second", second);
    second[1]->as<nn::BatchNorm1d>()->running_mean.fill_(0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  nn::Sequential first{nn::Linear(3, 4), nn::BatchNorm1d(4)};
  nn::Sequential second{nn::Linear(4, 4), nn::BatchNorm1d(nn::BatchNormOptions(4).momentum(0.3)), nn::Tanh()};
};

TEST(SyncBatchNorm, TakesThePlaceOfThoseInASequential) {
  Prepared prepare;
  prepare.options.sync_batch_norm = true;
  const auto split = even();
  prepare.weigh(split);
  const auto net = std::make_shared<Layers>(), whole = std::make_shared<Layers>();
  torch::optim::SGD optimizer(net->parameters(), 0.1), of_whole(whole->parameters(), 0.1);
  const auto names = net->named_parameters().keys(), buffers = net->named_buffers().keys();

  const auto prepared = prepare(net);
  EXPECT_NE(net->first[1]->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_NE(net->second[1]->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_NE(net->named_modules()["second.1"]->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_EQ(net->named_parameters().keys(), names);
  EXPECT_EQ(net->named_buffers().keys(), buffers);
  EXPECT_EQ(net->named_buffers()["second.1.running_mean"][0].item<float>(), 0.5f);
  for (int step = 0; step < 2; ++step) {
    const auto all = values({sum_of(split), 3}, step, at::kFloat);
    const auto rank0 = whole->named_parameters();
    optimizer.zero_grad();
    of_whole.zero_grad();
    if (step == 0) {  // rank 0's weights
      const at::NoGradGuard no_grad;
      for (const auto& item : net->named_parameters()) rank0[item.key()].copy_(item.value());
    }
    net->forward(own_part(all, split)).square().mean().backward();
    whole->forward(all).square().mean().backward();
    optimizer.step();
    of_whole.step();
  }
  const auto want = whole->named_parameters(), want_buffers = whole->named_buffers();
  for (const auto& item : net->named_parameters()) expect_close(item.value(), want[item.key()], item.key());
  for (const auto& item : net->named_buffers()) expect_close(item.value(), want_buffers[item.key()], item.key());
}

TEST(SyncBatchNorm, TakesThePlaceOfOperatorsInAnExportedProgram) {
  const test::Folder folder;
  test::write_bytes(folder / "norms.pt2", test::exported_program("norms"));
  auto net = load_exported(folder / "norms.pt2"), whole = load_exported(folder / "norms.pt2");
  Prepared prepare;
  prepare.options.sync_batch_norm = true;
  const auto split = uneven();
  prepare.weigh(split);
  torch::optim::SGD optimizer(net->parameters(), 0.1), of_whole(whole->parameters(), 0.1);
  const auto prepared = prepare(net.ptr());
  for (int step = 0; step < 3; ++step) {
    const auto all = values({sum_of(split), 3}, step, at::kFloat);
    optimizer.zero_grad();
    of_whole.zero_grad();
    net->forward(own_part(all, split)).square().mean().backward();
    whole->forward(all).square().mean().backward();
    optimizer.step();
    of_whole.step();
  }
  const auto want = whole->named_parameters(), want_buffers = whole->named_buffers();
  for (const auto& item : net->named_parameters()) expect_close(item.value(), want[item.key()], item.key());
  for (const auto& item : net->named_buffers()) expect_close(item.value(), want_buffers[item.key()], item.key());
  net->eval();
  whole->eval();
  const auto x = values({2, 3}, 7, at::kFloat);
  expect_close(net->forward(x), whole->forward(x), "evaluation");
}

TEST(SyncBatchNorm, WhatCannotBeExchangedIsNamed) {
  struct Block : nn::Module {
    explicit Block(bool tracks = true) {
      register_module("norm", nn::BatchNorm2d(nn::BatchNormOptions(4).track_running_stats(tracks)));
    }
  };
  struct Derived : nn::BatchNorm1dImpl {
    Derived() : nn::BatchNorm1dImpl(4) {}
  };
  torch::jit::Module script("__torch__.Norm");
  script.register_buffer("running_mean", at::zeros({4}));
  script.define("def forward(self, x: Tensor) -> Tensor:\n    return x + self.running_mean\n");
  const auto sequential = [](std::shared_ptr<nn::Module> last) {
    auto net = std::make_shared<nn::Module>();
    net->register_module("layers", nn::Sequential(nn::Linear(2, 4), nn::BatchNorm1d(4)));
    net->register_module("last", std::move(last));
    return net;
  };
  const std::pair<std::shared_ptr<nn::Module>, std::string> modules[] = {
      {sequential(std::make_shared<Block>()), "last.norm is"},
      {sequential(std::make_shared<Block>(/*tracks=*/false)), "last.norm is"},
      {nn::Sequential(nn::Linear(2, 4), nn::BatchNorm1d(4), std::make_shared<Derived>()).ptr(), "2 is a batch-norm"},
      {sequential(std::make_shared<ScriptModuleImpl>(script)), "last is"},
      {std::make_shared<nn::BatchNorm1dImpl>(4), "the model itself is"}};
  for (const auto& [module, words] : modules) {
    Prepared prepare;
    prepare.options.sync_batch_norm = true;
    try {
      prepare(module);
      FAIL() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    for (const auto& part : module->modules()) EXPECT_EQ(part->as<SyncBatchNorm1d>(), nullptr);
  }
  Prepared prepare;
  prepare.options.sync_batch_norm = true;
  prepare(sequential(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(4).track_running_stats(true)).ptr()));
}

TEST(SyncBatchNorm, WhatItCannotBeWithIsRefused) {
  const auto storage = test::shared_folder();
  const auto code_of = [&](const std::string& name, std::optional<int> virtual_workers,
                           const std::function<void(Session&)>& loop) {
    TorchTrainerOptions options{.run_config = {.name = name}, .datasets = {{"train", test::line()}}};
    if (virtual_workers) options.scaling_config.virtual_workers = *virtual_workers;
    return test::run({storage, {}, options}, [&](Session& session, const Config&) { loop(session); }).first;
  };
  const auto prepare = [](Session& session) { session.prepare_model(nn::Sequential(SyncBatchNorm1d(4))); };
  EXPECT_EQ(code_of("virtual", world().size(), prepare), 64);
  EXPECT_EQ(code_of("join", {}, [&](Session& session) { prepare(session), session.join(); }), 64);
  EXPECT_EQ(code_of("gradients", {},
                    [&](Session& session) {
                      auto net = session.prepare_model(nn::Sequential(nn::Linear(1, 4), SyncBatchNorm1d(4)));
                      const auto y = net->forward(values({2, 1}, session.world_rank(), at::kFloat)).square().sum();
                      if (session.world_size() == 1) throw Error(ExitCode::usage, "testing", "one rank", "Use two");
                      torch::autograd::grad({y}, {net->parameters()[0]}, {}, true, /*create_graph=*/true);
                    }),
            64);
}

TEST(SyncBatchNorm, TrainsOverUnevenShards) {
  // 46 samples: the last step is never full. A line's statistics, whoever takes which sample.
  const auto storage = test::shared_folder();
  at::Tensor mean;
  const auto loop = [&](Session& session, const Config&) {
    auto net = session.prepare_model(nn::Sequential(nn::BatchNorm1d(nn::BatchNormOptions(1).momentum(std::nullopt))),
                                     {.sync_batch_norm = true});
    for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 46}))
      net->forward(batch["x"]).sum().backward();
    mean = net->named_buffers()["0.running_mean"];
  };
  TorchTrainerOptions options{.run_config = {.name = "uneven"}, .datasets = {{"train", test::line()}}};
  EXPECT_EQ(test::run({storage, {}, options}, loop).first, 0);
  EXPECT_NEAR(mean.item<double>(), 22.5 / 46, 1e-6);
}

}  // namespace
}  // namespace muster::sync_batch_norm_test
