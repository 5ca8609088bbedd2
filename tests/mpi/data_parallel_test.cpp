// Data parallelism in a program that keeps its own loop, over the ranks of a communicator. What a process keeps as it
// is, tests/mpi/own_loop.cpp looks at.
#include "muster/data_parallel.hpp"
#include "muster/error.hpp"
#include "support/prepared.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::data_parallel_test {
namespace {

using namespace std::chrono_literals;
using test::expect_close;
using test::expect_same_bits_everywhere;
using test::mean_over_ranks;
using test::values;
using test::world;

/// Fails the test, on this rank, unless the action throws an Error with that code and text. Returns the text.
std::string error_of(ExitCode code, const std::string& part, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error: " << part;
  return {};
}

/// The same, and the text is the same on all ranks. Collective.
void all_get_error(ExitCode code, const std::string& part, const std::function<void()>& action) {
  const auto texts = world().all_gather(error_of(code, part, action));
  for (const auto& text : texts) EXPECT_EQ(text, texts.front());
}

/// A hook that muster cannot share a parameter with.
struct OfTheProgram : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};

torch::nn::Linear linear(double seed = world().rank()) {
  torch::nn::Linear net(3, 2);
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(0.1 + seed);
  return net;
}

at::Tensor loss_of(torch::nn::Linear& net, double seed = 0) {
  return net->forward(values({4, 3}, seed)).square().mean();
}

/// The gradient that this rank has without any other.
at::Tensor own_gradient(double weight_seed, double seed = 0) {
  auto alone = linear(weight_seed);
  loss_of(alone, seed).backward();
  return alone->weight.grad();
}

TEST(DataParallel, BackwardAveragesAndAllHaveTheWeightsOfRankZero) {
  auto net = linear();
  const DataParallel parallel(world(), net);
  EXPECT_EQ(net->weight[0][0].item<double>(), 0.1f);
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "the gradient");
  expect_same_bits_everywhere(net->weight.grad(), "the gradient");
}

TEST(DataParallel, TheWeightsOfTheStepsCount) {
  auto net = linear();
  const DataParallel parallel(world(), net);
  const double mine = 1.5 + world().rank(), all = world().all_reduce(mine);
  {
    const auto scope = parallel.step(mine);
    loss_of(net).backward();
  }
  expect_close(net->weight.grad(), test::weighted_sum(own_gradient(0), mine / all), "the sum of w g over the sum of w");
  net->zero_grad();
  {
    const auto scope = parallel.step(world().rank() == 0 ? 2 : 0);
    (loss_of(net) * (world().rank() == 0 ? 1 : std::nan(""))).backward();
  }
  expect_close(net->weight.grad(), test::weighted_sum(own_gradient(0), world().rank() == 0), "that of rank 0 alone");
  for (const double bad : {-1.0, std::nan(""), 1e-10, 1e13})
    all_get_error(ExitCode::usage, " is no weight", [&] { static_cast<void>(parallel.step(bad)); });
  net->zero_grad();
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "equal weights after the scope");
}

TEST(DataParallel, NoSyncAddsUpUntilTheNextBackward) {
  auto net = linear();
  const DataParallel parallel(world(), net);
  {
    const auto scope = parallel.no_sync();
    loss_of(net, 1).backward();
    expect_close(net->weight.grad(), own_gradient(0, 1), "this rank's own");
  }
  loss_of(net, 2).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0, 1) + own_gradient(0, 2)), "the sum");
}

TEST(DataParallel, PreparedOptimizersStepAlikeFusedOrNot) {
  std::vector<at::Tensor> stepped;
  for (const auto fuse : {Fuse::never, Fuse::always}) {
    auto net = linear();
    DataParallel parallel(world(), net);
    auto optimizer =
        parallel.prepare_optimizer(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
                                   {.max_grad_norm = 0.5, .fuse = fuse});
    EXPECT_EQ(optimizer.fused(), fuse == Fuse::always && world().size() > 1);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      loss_of(net, i).backward();
      optimizer.step();
    }
    EXPECT_GT(optimizer.grad_norm(), 0);
    expect_same_bits_everywhere(net->weight, "the weights");
    stepped.push_back(net->weight.detach().clone());
  }
  expect_close(stepped[1], stepped[0], "fused");
}

TEST(DataParallel, LeavesNoHooksBehindForTheNext) {
  auto net = linear();
  for (int i = 0; i < 100; ++i) DataParallel(world(), net);
  EXPECT_EQ(torch::autograd::impl::get_autograd_meta(net->weight)->cpp_hooks_list_->size(), 1);
  const DataParallel parallel(world(), net);
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "the hooks belong to the last one");
}

TEST(DataParallel, RanksThatDisagreeGetOneError) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const bool odd = world().rank() == world().size() - 1;
  all_get_error(ExitCode::usage, "bucket_bytes is ",
                [&] { DataParallel(world(), linear(), {.model = {.bucket_bytes = odd ? 7u : 8u}}); });
  all_get_error(ExitCode::usage, "timeout_ms is ",
                [&] { DataParallel(world(), linear(), {.timeout = odd ? 40s : 50s}); });
  all_get_error(ExitCode::usage, "timeout_ms is ",
                [&] { DataParallel(world(), linear(), {.timeout = odd ? 0s : 50s}); });
  all_get_error(ExitCode::data, "weight", [&] { DataParallel(world(), torch::nn::Linear(3, odd ? 4 : 5)); });
  auto net = linear();
  DataParallel parallel(world(), net);
  all_get_error(ExitCode::usage, "max_grad_norm is ", [&] {
    parallel.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.max_grad_norm = odd ? 1.0 : 2.0});
  });
  const auto folder = test::shared_folder();
  all_get_error(ExitCode::usage, "folder is ", [&] { parallel.save(folder / (odd ? "a" : "b"), {{"net", net}}); });
  all_get_error(ExitCode::usage, "folder is ", [&] { parallel.load(odd ? "" : folder, {{"net", net}}); });
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "the averages go on");
}

TEST(DataParallel, RefusesWhatItCannotPrepare) {
  all_get_error(ExitCode::usage, "the module is null",
                [] { DataParallel(world(), std::shared_ptr<torch::nn::Module>()); });
  all_get_error(ExitCode::usage, "the timeout is 0 ms", [] { DataParallel(world(), linear(), {.timeout = 0s}); });
  auto net = linear();
  std::optional<DataParallel> parallel(std::in_place, world(), net);
  all_get_error(ExitCode::data, "is prepared already", [&] { DataParallel(world(), net); });
  parallel.reset();
  const DataParallel again(world(), net);
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "prepared once more");
}

TEST(DataParallel, WhatOneRankCannotPrepareEndsTheWaitsOfTheOthers) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const int odd = world().size() - 1;
  auto net = linear();
  if (world().rank() == odd)
    torch::autograd::impl::set_post_acc_grad_hooks(net->weight, std::make_unique<OfTheProgram>());
  error_of(ExitCode::data, "has a post-accumulate-gradient hook", [&] { DataParallel(world(), net); });
}

TEST(DataParallel, SeveralMayLiveAndEndInAnyOrder) {
  for (const bool first_goes_first : {true, false}) {
    auto a = linear(0), b = linear(0);
    auto pa = std::make_unique<DataParallel>(world(), a), pb = std::make_unique<DataParallel>(world(), b);
    auto oa = pa->prepare_optimizer(torch::optim::SGD(a->parameters(), 0.1), {.fuse = Fuse::always});
    (loss_of(a, 1) + loss_of(b, 2)).backward();
    expect_close(b->weight.grad(), mean_over_ranks(own_gradient(0, 2)), "of the second");
    oa.step();
    expect_close(a->weight, linear(0)->weight - 0.1 * mean_over_ranks(own_gradient(0, 1)), "of the first");
    (first_goes_first ? pa : pb).reset();
    auto& living = first_goes_first ? b : a;
    auto& dead = first_goes_first ? a : b;
    dead->zero_grad();
    loss_of(dead, 3).backward();
    auto alone = linear(0);
    {
      const at::NoGradGuard no_grad;
      alone->weight.copy_(dead->weight);
      alone->bias.copy_(dead->bias);
    }
    loss_of(alone, 3).backward();
    expect_close(dead->weight.grad(), alone->weight.grad(), "an ordinary model again");
    if (first_goes_first) {
      const auto before = a->weight.detach().clone();
      oa.step();  // its averaging is gone
      expect_close(a->weight, before - 0.1 * a->weight.grad(), "an ordinary optimizer");
    }
    living->zero_grad();
    loss_of(living, 4).backward();
    if (!first_goes_first) oa.average_gradients();  // it is fused
    expect_same_bits_everywhere(living->weight.grad(), "the other goes on");
  }
}

TEST(DataParallel, HoldsAModuleThatItsOwnerHasDropped) {
  auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
  const auto weight = net->weight;
  const std::weak_ptr<torch::nn::LinearImpl> dropped = net;
  {
    DataParallel parallel(world(), net);
    net.reset();
    EXPECT_FALSE(dropped.expired());
    (weight.sum() * (1 + world().rank())).backward();
    EXPECT_FLOAT_EQ(weight.grad()[0][0].item<float>(), static_cast<float>((1 + world().size()) / 2.0));
    parallel.average_buffers();
  }
  EXPECT_TRUE(dropped.expired());
}

TEST(DataParallel, JoinsRanksWithDifferentNumbersOfBatches) {
  auto net = linear();
  const DataParallel parallel(world(), net);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  {
    const auto join = parallel.join();
    for (int i = 0; i <= world().rank(); ++i) {
      optimizer.zero_grad();
      loss_of(net, i).backward();
      optimizer.step();
    }
  }
  expect_same_bits_everywhere(net->weight, "the weights");
}

TEST(DataParallel, AveragesTheStatisticsOfBatchNorms) {
  torch::nn::BatchNorm1d norm(2);
  DataParallel parallel(world(), norm);
  norm->forward(values({8, 2}, 1));
  const auto mean = mean_over_ranks(norm->running_mean);
  parallel.average_buffers();
  expect_close(norm->running_mean, mean, "the mean");
}

// As a main that catches what its loop throws, prints it and ends.
TEST(DataParallel, AnExceptionThatEndsItOnOneRankEndsTheWaitsOfTheOthers) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const int odd = world().size() - 1;
  auto net = linear(0);
  const auto begin = std::chrono::steady_clock::now();
  try {
    const DataParallel parallel(world(), net);
    loss_of(net).backward();
    if (world().rank() == odd) throw std::logic_error("of the program");
    for (int i = 0; i < 100; ++i) loss_of(net).backward();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::logic_error&) {
    EXPECT_EQ(world().rank(), odd);
  } catch (const RemoteError& error) {
    EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(odd)), std::string::npos) << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s) << "not the timeout";
  net->zero_grad();
  const DataParallel again(world(), net);
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "the ranks go on together");
}

TEST(DataParallel, AfterAnExceptionInBackwardAllGoOn) {
  auto net = linear();
  const DataParallel parallel(world(), net);
  for (int round = 0; round < 3; ++round) {
    net->zero_grad();
    auto output = net->forward(values({4, 3}, 0));
    output.register_hook([](const at::Tensor& gradient) -> at::Tensor {
      if (gradient.defined()) throw std::runtime_error("in the middle");
      return gradient;
    });
    EXPECT_ANY_THROW((output.square().mean() + net->bias.sum()).backward());
    net->zero_grad();
    loss_of(net).backward();
    expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "after the exception");
  }
}

TEST(DataParallel, PastTheTimeoutTheLateRankIsNamed) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  auto net = linear(0);
  {
    std::optional<DataParallel> parallel(std::in_place, world(), net, DataParallelOptions{.timeout = 500ms});
    if (world().rank() > 0) error_of(ExitCode::retry, "rank 0", [&] { loss_of(net).backward(); });
    world().barrier();  // whose timeout is still its own
    parallel.reset();
  }
  net->zero_grad();
  const DataParallel again(world(), net);
  loss_of(net).backward();
  expect_close(net->weight.grad(), mean_over_ranks(own_gradient(0)), "the ranks go on together");
}

// Saving and loading.

class Saved : public testing::Test {
 protected:
  /// The values that a state has, on all ranks.
  struct Values {
    explicit Values(double seed) : net(linear(seed)), count(static_cast<std::int64_t>(seed)) {
      own = at::full({2}, seed + world().rank());
    }
    StateEntries entries(torch::optim::Optimizer& optimizer) {
      return {{"net", net}, {"optimizer", optimizer}, {"count", count}, {"own", per_rank(own)}};
    }
    torch::nn::Linear net;
    std::int64_t count;
    at::Tensor own;
  };
  /// The names in the folder, on all ranks.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) found.push_back(entry.path().filename());
    std::ranges::sort(found);
    world().barrier();
    return found;
  }

  const std::filesystem::path folder = test::shared_folder() / "deep" / "saved";
};

TEST_F(Saved, ComesBackWithTheOptimizer) {
  Values a(1), b(2);
  for (const auto fuse : {Fuse::always, Fuse::never}) {
    DataParallel pa(world(), a.net), pb(world(), b.net);
    const torch::optim::SGDOptions momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
    auto oa = pa.prepare_optimizer(torch::optim::SGD(a.net->parameters(), momentum), {.fuse = fuse});
    auto ob = pb.prepare_optimizer(torch::optim::SGD(b.net->parameters(), momentum), {.fuse = fuse});
    const auto step = [](torch::nn::Linear& net, torch::optim::Optimizer& optimizer) {
      optimizer.zero_grad();
      loss_of(net).backward();
      optimizer.step();
    };
    const bool is_there = fuse == Fuse::never;
    EXPECT_EQ(pb.load(folder, b.entries(ob)), is_there);
    step(a.net, oa);
    pa.save(folder, a.entries(oa));
    ASSERT_TRUE(pb.load(folder, b.entries(ob)));
    EXPECT_EQ(b.count, 1);
    EXPECT_EQ(b.own[0].item<double>(), 1 + world().rank());
    step(a.net, oa);
    step(b.net, ob);
    EXPECT_TRUE(a.net->weight.equal(b.net->weight)) << "with the same momentum";
    EXPECT_EQ(names().size(), 1u) << "the older one was replaced";
    world().barrier();
  }
}

TEST_F(Saved, WhatIsThereStaysIfARankFails) {
  Values a(1);
  DataParallel parallel(world(), a.net);
  parallel.save(folder, {{"net", a.net}});
  const auto before = names();
  const bool odd = world().rank() == world().size() - 1;
  const StateEntry failing(
      [odd]() -> StateDict {
        if (odd) throw std::runtime_error("of the program");
        return {.values = 1};
      },
      [](const StateDict&) {});
  all_get_error(ExitCode::user_error, "of the program", [&] {
    parallel.save(folder, {{"net", a.net}, {"own", failing}});
  });
  EXPECT_EQ(names(), before);
  Values b(2);
  DataParallel other(world(), b.net);
  EXPECT_TRUE(other.load(folder, {{"net", b.net}}));
  EXPECT_EQ(b.net->weight[0][0].item<double>(), 1.1f);
}

TEST_F(Saved, NothingChangesIfItDoesNotFit) {
  Values a(1), b(2);
  DataParallel pa(world(), a.net), pb(world(), b.net);
  pa.save(folder, {{"net", a.net}, {"count", a.count}});
  auto larger = at::zeros({3});
  all_get_error(ExitCode::data, "larger", [&] { pb.load(folder, {{"net", b.net}, {"larger", larger}}); });
  if (world().size() > 1) {  // on one rank alone
    const bool odd = world().rank() == world().size() - 1;
    StateEntries entries{{"net", b.net}, {"count", b.count}};
    if (odd) entries.pop_back();
    all_get_error(ExitCode::data, "count", [&] { pb.load(folder, entries); });
  }
  EXPECT_EQ(b.count, 2);
  EXPECT_EQ(b.net->weight[0][0].item<double>(), 2.1f);
}

TEST_F(Saved, DamageIsAnError) {
  Values a(1);
  DataParallel parallel(world(), a.net);
  parallel.save(folder, {{"net", a.net}});
  if (world().rank() == 0)
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      std::filesystem::resize_file(entry.path() / "state.h5", 100);
  world().barrier();
  for (int i = 0; i < 2; ++i)
    all_get_error(ExitCode::data, "damaged", [&] { parallel.load(folder, {{"net", a.net}}); });
  parallel.save(folder, {{"net", a.net}});
  EXPECT_TRUE(parallel.load(folder, {{"net", a.net}}));
}

TEST_F(Saved, LeavesTheFoldersOfRunsAlone) {
  Values a(1);
  DataParallel parallel(world(), a.net);
  if (world().rank() == 0) {
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "params.json") << "{}";
  }
  world().barrier();
  all_get_error(ExitCode::usage, "it has a params.json", [&] { parallel.save(folder, {{"net", a.net}}); });
  all_get_error(ExitCode::usage, "it has a params.json", [&] { parallel.load(folder, {{"net", a.net}}); });
  all_get_error(ExitCode::usage, "the folder has no name", [&] { parallel.save("", {{"net", a.net}}); });
}

}  // namespace
}  // namespace muster::data_parallel_test
