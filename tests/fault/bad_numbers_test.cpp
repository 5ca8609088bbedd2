// One sample of one rank is NaN: what the policy says is done, on all ranks alike.
#include "support/job.hpp"

#include "muster/muster.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster {
namespace {

using test::run;
using test::world;

constexpr std::int64_t poisoned = 20;  ///< sample; it lies in the third batch of eight
constexpr std::int64_t epochs = 3;

/// test::line() with a NaN, or with NaN alone.
Dataset poison(bool all = false) {
  const auto x = at::arange(46, at::kFloat).unsqueeze(1) / 46;
  auto y = 3 * x - 1;
  if (all)
    y.fill_(std::nanf(""));
  else
    y[poisoned] = std::nanf("");
  return Dataset::from_tensors({{"x", x}, {"y", y}});
}

TorchTrainerOptions options_for(const std::string& name, FailureConfig failure, bool all = false) {
  return {.run_config = {.name = name, .failure_config = failure}, .datasets = {{"train", poison(all)}}};
}

struct Way {
  Fuse fuse = Fuse::never;
  double max_grad_norm = 0;
};

struct Fit {
  std::vector<double> weights;
  std::int64_t skipped = 0;
  int attempts = 0;
  std::int64_t bad_rank = -1;  ///< where the poisoned sample was
};

void take_weights(torch::nn::Module& net, Fit& fit) {
  fit.weights.clear();
  for (const auto& parameter : net.parameters())
    for (std::int64_t i = 0; i < parameter.numel(); ++i) fit.weights.push_back(parameter.flatten()[i].item<double>());
}

/// Reports after every epoch. `by_hand`: the loop itself leaves the bad steps out.
void fit_line(Session& session, Fit& fit, const Way& way, bool by_hand = false) {
  ++fit.attempts;
  auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::Linear(8, 1)));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05),
                                             {.max_grad_norm = way.max_grad_norm, .fuse = way.fuse});
  EXPECT_EQ(optimizer.fused(), way.fuse == Fuse::always && session.world_size() > 1);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
    int batches = 0;
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = 8})) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      if (batch["y"].isnan().any().item<bool>()) fit.bad_rank = session.world_rank();
      if (!by_hand || batches != poisoned / 8) optimizer.step();
      ++batches;
    }
    session.report({{"epoch", epoch}}, state);
  }
  take_weights(*net, fit);
  fit.skipped = optimizer.skipped_steps();
}

std::string text_of(const std::optional<Result>& result) {
  return result && result->error ? result->error->what() : "no error";
}

void expect_same_everywhere(const std::string& value) {
  for (const auto& theirs : world().all_gather(value)) EXPECT_EQ(theirs, value);
}

void expect_finite(const std::vector<double>& weights) {
  for (const double weight : weights) EXPECT_TRUE(std::isfinite(weight));
}

class Ways : public testing::TestWithParam<Way> {
 protected:
  std::vector<double> by_hand() {
    Fit fit;
    const auto [code, result] = run({storage, {}, options_for("by-hand", {})},
                                    [&](Session& session, const Config&) { fit_line(session, fit, GetParam(), true); });
    EXPECT_EQ(code, 0) << text_of(result);
    expect_finite(fit.weights);
    return fit.weights;
  }
  const std::filesystem::path storage = test::shared_folder();
};
INSTANTIATE_TEST_SUITE_P(BadNumbers, Ways,
                         testing::Values(Way{}, Way{.max_grad_norm = 0.5}, Way{.fuse = Fuse::always},
                                         Way{.fuse = Fuse::always, .max_grad_norm = 0.5}));

TEST_P(Ways, AreLeftAloneUnlessAskedFor) {
  Fit fit;
  EXPECT_EQ(run({storage, {}, options_for("ignore", {})},
                [&](Session& session, const Config&) { fit_line(session, fit, GetParam()); })
                .first,
            0);
  EXPECT_TRUE(std::isnan(fit.weights.at(0)));
}

TEST_P(Ways, StopWithTheStepTheParameterAndTheRank) {
  Fit fit;
  const auto [code, result] = run({storage, {}, options_for("stop", {.bad_numbers = BadNumbers::stop})},
                                  [&](Session& session, const Config&) { fit_line(session, fit, GetParam()); });
  EXPECT_EQ(code, 1);
  const auto text = text_of(result);
  const auto rank = world().all_reduce(fit.bad_rank, ReduceOp::max);
  EXPECT_NE(text.find("on rank " + std::to_string(rank)), std::string::npos) << text;
  EXPECT_NE(text.find("in step 3"), std::string::npos) << text;
  EXPECT_NE(text.find("parameter "), std::string::npos) << text;
  expect_same_everywhere(text);
}

TEST_P(Ways, StopNamesTheParameterThatIsBad) {
  struct Pair : torch::nn::Module {
    at::Tensor good = register_parameter("good", at::ones({64})), bad = register_parameter("bad", at::ones({64}));
  };
  const auto [code, result] =
      run({storage, {}, options_for("named", {.bad_numbers = BadNumbers::stop})}, [&](Session& session, const Config&) {
        auto net = session.prepare_model(std::make_shared<Pair>());
        auto optimizer =
            session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1),
                                      {.max_grad_norm = GetParam().max_grad_norm, .fuse = GetParam().fuse});
        (net->good.sum() + net->bad.mul(std::nan("")).sum()).backward();
        optimizer.step();
      });
  EXPECT_EQ(code, 1);
  EXPECT_NE(text_of(result).find("parameter bad"), std::string::npos) << text_of(result);
}

TEST_P(Ways, SkipLeavesTheStepOut) {
  Fit fit;
  const auto [code, result] = run({storage, {}, options_for("skip", {.bad_numbers = BadNumbers::skip})},
                                  [&](Session& session, const Config&) { fit_line(session, fit, GetParam()); });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(fit.skipped, epochs);
  EXPECT_EQ(fit.weights, by_hand());
}

TEST_P(Ways, RollBackGoesOnPastTheStep) {
  Fit fit;
  const auto [code, result] = run({storage, {}, options_for("back", {.bad_numbers = BadNumbers::roll_back})},
                                  [&](Session& session, const Config&) { fit_line(session, fit, GetParam()); });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(fit.attempts, 1 + epochs) << "each epoch is begun again once";
  EXPECT_EQ(result->metrics_history.size(), static_cast<std::size_t>(epochs));
  EXPECT_EQ(fit.weights, by_hand());
}

TEST_P(Ways, EndTheAttemptAlsoIfTheirErrorIsCaught) {
  Fit fit;
  const auto train = [&](Session& session, const Config&) {
    try {
      fit_line(session, fit, GetParam());
    } catch (const std::exception&) {
      EXPECT_THROW(session.barrier(), Error);
    }
  };
  const auto back = run({storage, {}, options_for("back", {.bad_numbers = BadNumbers::roll_back})}, train);
  EXPECT_EQ(back.first, 0) << text_of(back.second);
  EXPECT_EQ(fit.attempts, 1 + epochs);
  EXPECT_EQ(back.second->metrics_history.size(), static_cast<std::size_t>(epochs));
  EXPECT_EQ(fit.weights, by_hand());

  const auto stop = run({storage, {}, options_for("stop", {.bad_numbers = BadNumbers::stop})}, train);
  EXPECT_EQ(stop.first, 1);
  EXPECT_NE(text_of(stop.second).find("in step 3"), std::string::npos) << text_of(stop.second);
}

TEST_P(Ways, EndAtTheLimit) {
  for (const auto policy : {BadNumbers::skip, BadNumbers::roll_back}) {
    Fit fit;
    const std::string name = policy == BadNumbers::skip ? "skip" : "back";
    const auto [code, result] =
        run({storage, {}, options_for(name, {.bad_numbers = policy, .bad_numbers_limit = 2}, /*all=*/true)},
            [&](Session& session, const Config&) { fit_line(session, fit, GetParam()); });
    EXPECT_EQ(code, 1);
    EXPECT_EQ(fit.attempts, policy == BadNumbers::skip ? 1 : 3);
    EXPECT_NE(text_of(result).find(" 2 "), std::string::npos) << text_of(result);
    expect_same_everywhere(text_of(result));
  }
}

const FailureConfig skip{.bad_numbers = BadNumbers::skip};

TEST(BadNumbers, AnotherOptimizerIsAnError) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, options_for("other", skip)}, [](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(code, 64);
  EXPECT_NE(text_of(result).find("prepare_optimizer"), std::string::npos) << text_of(result);
}

TEST(BadNumbers, OfOneOptimizerAreNoMatterToAnother) {
  const auto storage = test::shared_folder();
  std::int64_t good = -1, bad = -1;
  const auto [code, result] = run({storage, {}, options_for("two", skip)}, [&](Session& session, const Config&) {
    auto [one, other] = session.prepare_models(torch::nn::Linear(1, 1), torch::nn::Linear(1, 1));
    auto first = session.prepare_optimizer(torch::optim::SGD(one->parameters(), 0.1));
    auto second = session.prepare_optimizer(torch::optim::SGD(other->parameters(), 0.1));
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
      first.zero_grad();
      second.zero_grad();
      torch::mse_loss(one->forward(batch["x"]), batch["y"]).backward();
      other->forward(batch["x"]).sum().backward();
      first.step();
      second.step();
    }
    bad = first.skipped_steps();
    good = second.skipped_steps();
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(bad, 1);
  EXPECT_EQ(good, 0);
}

TEST(BadNumbers, ThatAreAddedUpLeaveTheWholeStepOut) {
  for (const bool no_sync : {false, true}) {
    const auto storage = test::shared_folder();
    Fit fit;
    const auto [code, result] = run({storage, {}, options_for("sum", skip)}, [&](Session& session, const Config&) {
      auto net = session.prepare_model(torch::nn::Linear(1, 1));
      auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1));
      int batches = 0;
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
        const bool steps = ++batches % 2 == 0;
        const auto loss = [&] { return torch::mse_loss(net->forward(batch["x"]), batch["y"]); };
        if (no_sync && !steps) {
          const auto alone = session.no_sync();
          loss().backward();
        } else {
          loss().backward();
        }
        if (!steps) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
      fit.skipped = optimizer.skipped_steps();
      take_weights(*net, fit);
    });
    EXPECT_EQ(code, 0) << text_of(result);
    EXPECT_EQ(fit.skipped, 1);
    expect_finite(fit.weights);
  }
}

TEST(BadNumbers, OfVirtualWorkersAreThoseOfTheStep) {
  const auto storage = test::shared_folder();
  Fit fit;
  auto options = options_for("virtual", skip);
  options.scaling_config.virtual_workers = 6;
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1));
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
    }
    fit.skipped = optimizer.skipped_steps();
    take_weights(*net, fit);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(fit.skipped, 1);
  expect_finite(fit.weights);
}

TEST(BadNumbers, AreFirstTheScalers) {
  const auto storage = test::shared_folder();
  Fit fit;
  int left_out = 0, steps = 0;
  const auto [code, result] = run({storage, {}, options_for("scaler", skip)}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1));
    auto scaler = session.grad_scaler();
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
      optimizer.zero_grad();
      scaler.scale(torch::mse_loss(net->forward(batch["x"]), batch["y"])).backward();
      scaler.unscale_(optimizer);
      if (steps++ == 0) net->weight.mutable_grad().fill_(std::nan(""));  // too late for the scaler
      left_out += !scaler.step(optimizer);
      scaler.update();
    }
    fit.skipped = optimizer.skipped_steps();
    take_weights(*net, fit);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(left_out, 2) << "by the scaler, and by the optimizer";
  EXPECT_EQ(fit.skipped, 1);
  expect_finite(fit.weights);
}

TEST(BadNumbers, InsideJoinAreLeftOutByThoseWhoStep) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto [code, result] = run({storage, {}, options_for("join", skip)}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.fuse = Fuse::never});
    const int last = 2 + world().size() - 1;  // batches of the last rank, which alone has them then
    auto x = torch::ones({2, 1});
    {
      auto join = session.join();
      for (int i = 0; i < 2 + session.world_rank(); ++i) {
        optimizer.zero_grad();
        (net->forward(x).sum() * (i == last - 1 ? std::nan("") : 1.0)).backward();
        optimizer.step();
      }
    }
    fit.skipped = optimizer.skipped_steps();
    take_weights(*net, fit);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(fit.skipped, world().rank() == world().size() - 1 ? 1 : 0);
  expect_finite(fit.weights);
}

/// A parameter of each rank's own, in an optimizer with those of the model.
TEST(BadNumbers, OfOneRankAloneAreThoseOfAll) {
  const auto storage = test::shared_folder();
  Fit fit;
  const auto [code, result] = run({storage, {}, options_for("own", skip)}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto own = torch::ones({1}, torch::requires_grad());
    auto parameters = net->parameters();
    parameters.push_back(own);
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(parameters, 0.1));
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      net->forward(torch::ones({2, 1})).sum().backward();
      own.mutable_grad() = torch::full({1}, i == 1 && session.world_rank() == 0 ? std::nanf("") : 1.0f);
      optimizer.step();
    }
    fit.skipped = optimizer.skipped_steps();
    take_weights(*net, fit);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(fit.skipped, 1);
  expect_finite(fit.weights);
}

}  // namespace
}  // namespace muster
