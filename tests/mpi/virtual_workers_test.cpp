// Virtual workers: the same weights, bit for bit, at any number of workers.
#include "gradients/ordered_exchange.hpp"
#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "muster/process_group.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace muster::virtual_workers_test {
namespace {

using test::run;
using test::world;

TEST(VirtualWorkers, HalvesAreSummedInFloat) {
  const auto group = make_process_group(world());
  const auto sum = detail::gradients::ordered_sum(*group, {2, at::full({3}, 40000.0, at::kHalf)});
  EXPECT_TRUE(at::equal(sum, at::full({3}, 80000.0F * static_cast<float>(world().size()))));
}

struct Setting {
  bool batch_norm = true;
  std::int64_t samples = 48;  ///< two full steps of 12 shards of two
};

Dataset data_of(const Setting& setting) {
  const auto x = at::arange(setting.samples, at::kFloat).unsqueeze(1) / setting.samples;
  return Dataset::from_tensors({{"x", x}, {"y", 3 * x - 1}});
}

/// Trains for `epochs`, and reports in the middle of each as well. The batches of a step that this worker had.
std::vector<std::int64_t> train(Session& session, const Setting& setting, std::int64_t epochs) {
  torch::nn::Sequential layers(torch::nn::Linear(1, 8));
  if (setting.batch_norm) layers->push_back(torch::nn::BatchNorm1d(8));
  layers->push_back(torch::nn::Dropout(0.2));
  layers->push_back(torch::nn::Linear(8, 1));
  auto net = session.prepare_model(layers);
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05), {.max_grad_norm = 0.5});
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard("train");
  std::vector<std::int64_t> sizes;
  for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
    Mean loss;
    std::int64_t reported = session.global_step();
    for (auto& batch : shard.iter_torch_batches({.batch_size = 2, .shuffle = true})) {
      optimizer.zero_grad();
      if (session.global_step() % 2 ==
          0) {  // looking at split data inside a step leaves the shard's random state alone
        const torch::NoGradGuard no_grad;
        std::int64_t seen = 0;
        for (auto& other : shard.iter_torch_batches({.batch_size = 4})) seen += other.size();
        EXPECT_GT(seen, 0);
      }
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
      sizes.push_back(batch.size());
      if (session.global_step() == reported + 1) {
        session.report({{"loss", loss}}, state);
        reported = -1;
      }
    }
    {
      const auto evaluation = session.evaluation(net);
      static_cast<void>(net->forward(at::ones({3, 1})));
    }
    session.report({{"loss", loss}}, state);
  }
  return sizes;
}

StateDict trained(const std::filesystem::path& storage, const std::string& name, const Setting& setting, int workers,
                  std::int64_t epochs) {
  TorchTrainerOptions options{.scaling_config = {.num_workers = workers, .virtual_workers = 12},
                              .run_config = {.name = name},
                              .datasets = {{"train", data_of(setting)}}};
  std::vector<std::int64_t> sizes;
  const auto [code, result] = run({storage,
                                   {"--set", "epochs=" + std::to_string(epochs)},
                                   [&] {
                                     options.train_loop_config = {{"epochs", 0}};
                                     return options;
                                   }()},
                                  [&](Session& session, const Config&) { sizes = train(session, setting, epochs); });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(result && result->checkpoint);
  if (world().rank() < workers) {
    EXPECT_EQ(sizes.size() % static_cast<std::size_t>(12 / workers), 0u);
  }
  return result->checkpoint->to_dict();
}

void expect_same_bits(const StateDict& have, const StateDict& want, const std::string& what) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : want.tensors) {
    ASSERT_TRUE(have.tensors.contains(name)) << what << ", " << name;
    EXPECT_TRUE(at::equal(have.tensors.at(name), tensor)) << what << ", " << name;
  }
}

TEST(VirtualWorkers, TheSameBitsAtAnyNumberOfWorkers) {
  const auto storage = test::shared_folder();
  for (const auto& setting : {Setting{}, Setting{.batch_norm = false, .samples = 50}}) {
    const auto kind = setting.batch_norm ? std::string("even") : std::string("uneven");
    const auto want = trained(storage, kind + "1", setting, 1, 3);
    for (int workers = 2; workers <= world().size(); ++workers)
      expect_same_bits(trained(storage, kind + std::to_string(workers), setting, workers, 3), want,
                       kind + " on " + std::to_string(workers));
  }
}

TEST(VirtualWorkers, TheSameBitsWhenTheirNumberChangesHalfWay) {
  const auto storage = test::shared_folder();
  for (const auto& setting : {Setting{}, Setting{.batch_norm = false, .samples = 50}}) {
    const auto kind = setting.batch_norm ? std::string("even") : std::string("uneven");
    const auto want = trained(storage, kind + "whole", setting, 1, 4);
    trained(storage, kind + "changed", setting, world().size(), 1);
    trained(storage, kind + "changed", setting, std::max(1, world().size() - 1), 2);
    expect_same_bits(trained(storage, kind + "changed", setting, world().size(), 4), want, kind);
  }
}

TEST(VirtualWorkers, AnotherNumberOfThreadsIsWarnedOf) {
  const auto storage = test::shared_folder();
  const auto warnings_with = [&](const std::string& threads, std::int64_t epochs) {
    if (world().rank() == 0) testing::internal::CaptureStderr();
    run({storage,
         {"--threads", threads, "--log-level", "warn", "--resume", epochs > 1 ? "must" : "auto"},
         {.scaling_config = {.num_workers = 1, .virtual_workers = 12},
          .run_config = {.name = "threads"},
          .datasets = {{"train", data_of({})}}}},
        [&](Session& session, const Config&) { train(session, {}, epochs); });
    return world().broadcast(world().rank() == 0 ? testing::internal::GetCapturedStderr() : "");
  };
  const std::string text = "the run was saved with 1 thread of torch per worker and goes on with 2";
  EXPECT_EQ(warnings_with("1", 1).find(text), std::string::npos);
  EXPECT_EQ(warnings_with("1", 2).find(text), std::string::npos);
  EXPECT_NE(warnings_with("2", 3).find(text), std::string::npos);
}

/// Trains three epochs of two steps, with what loops do at each batch beside the optimizer's step.
StateDict trained_with_more(const std::filesystem::path& storage, int workers) {
  const TorchTrainerOptions options{.scaling_config = {.num_workers = workers, .virtual_workers = 12},
                                    .run_config = {.name = "more" + std::to_string(workers)},
                                    .datasets = {{"train", data_of({})}}};
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(
        torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::Dropout(0.2), torch::nn::Linear(8, 1)));
    auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05));
    EMA ema(net, {.decay = 0.9, .warmup = true});
    CosineWithWarmup scheduler(optimizer, {.warmup_steps = 2, .total_steps = 8});
    auto scaler = session.grad_scaler({.init_scale = 4, .growth_interval = 2});
    auto state = session.state(
        {{"model", net}, {"optimizer", optimizer}, {"ema", ema}, {"scheduler", scheduler}, {"scaler", scaler}});
    EXPECT_TRUE(session.is_step_complete());
    auto shard = session.get_dataset_shard("train");
    for ([[maybe_unused]] auto epoch : session.epochs(3)) {
      for (auto& batch : shard.iter_torch_batches({.batch_size = 2, .shuffle = true})) {
        optimizer.zero_grad();
        scaler.scale(torch::mse_loss(net->forward(batch["x"]), batch["y"])).backward();
        scaler.step(optimizer);
        scaler.update();
        ema.update();
        if (session.is_step_complete()) scheduler.step();
      }
      session.report({}, state);
    }
    EXPECT_EQ(session.global_step(), 6);
    EXPECT_EQ(ema.updates(), 6);
    EXPECT_EQ(scaler.get_scale(), 32) << "doubled after every second step";
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(result && result->checkpoint);
  return result->checkpoint->to_dict();
}

TEST(VirtualWorkers, AveragesSchedulesAndScalesAdvanceByTheStep) {
  const auto storage = test::shared_folder();
  const auto want = trained_with_more(storage, 1);
  for (int workers = 2; workers <= world().size(); ++workers) {
    const auto have = trained_with_more(storage, workers);
    expect_same_bits(have, want, std::to_string(workers));
    for (const char* entry : {"ema", "scheduler", "scaler"})
      EXPECT_EQ(have.values.at(entry), want.values.at(entry)) << workers << ", " << entry;
  }
}

/// A sample's error counts as often as it has tokens; some micro-batches have none.
Dataset data_with_tokens() {
  const auto x = at::arange(50, at::kDouble).unsqueeze(1) / 50;
  const auto tokens = at::arange(50, at::kDouble).unsqueeze(1).remainder(7).sub(3).clamp_min(0);
  return Dataset::from_tensors({{"x", x}, {"y", (3 * x - 1).sin()}, {"tokens", tokens}});
}

torch::nn::Sequential net_for_tokens() {
  torch::nn::Sequential net(torch::nn::Linear(1, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  net->to(at::kDouble);
  const torch::NoGradGuard no_grad;
  double seed = 0;
  for (auto& p : net->parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.7 + ++seed).view(p.sizes()));
  return net;
}

/// NaN if there is no token.
at::Tensor mean_over_tokens(torch::nn::Sequential& net, const Batch& batch) {
  const auto& tokens = batch["tokens"];
  return ((net->forward(batch["x"]) - batch["y"]).square() * tokens).sum() / tokens.sum();
}

std::vector<double> weights_of(torch::nn::Sequential& net) {
  std::vector<double> weights;
  for (const auto& p : net->parameters())
    for (std::int64_t i = 0; i < p.numel(); ++i) weights.push_back(p.flatten()[i].item<double>());
  return weights;
}

/// Trains on the mean over the tokens of each step, with 24 samples a step, the last one with two.
std::vector<double> trained_on_tokens(const std::string& name, int workers, std::optional<int> virtual_workers) {
  std::vector<double> weights;
  const BatchOptions batches = virtual_workers ? BatchOptions{.batch_size = 2} : BatchOptions{.global_batch_size = 24};
  const auto code = run({test::shared_folder(),
                         {},
                         {.scaling_config = {.num_workers = workers, .virtual_workers = virtual_workers},
                          .run_config = {.name = name},
                          .datasets = {{"train", data_with_tokens()}}}},
                        [&](Session& session, const Config&) {
                          auto net = session.prepare_model(net_for_tokens());
                          torch::optim::SGD optimizer(net->parameters(), 0.1);
                          for ([[maybe_unused]] auto epoch : session.epochs(3))
                            for (auto& batch : session.get_dataset_shard("train").iter_torch_batches(batches)) {
                              optimizer.zero_grad();
                              auto scope = session.step(batch, batch["tokens"].sum().item<double>());
                              mean_over_tokens(net, batch).backward();
                              optimizer.step();
                            }
                          weights = weights_of(net);
                        })
                        .first;
  EXPECT_EQ(code, 0) << name;
  return weights;
}

TEST(VirtualWorkers, AMeanOverTokensIsThatOfTheWholeStep) {
  auto net = net_for_tokens();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto data = data_with_tokens();
  const auto x = data.column("x"), y = data.column("y"), tokens = data.column("tokens");
  for (int epoch = 0; epoch < 3; ++epoch)
    for (std::int64_t first = 0; first < 50; first += 24) {
      const auto rows = [&](const at::Tensor& all) { return all.slice(0, first, first + 24); };
      optimizer.zero_grad();
      mean_over_tokens(net, Batch({{"x", rows(x)}, {"y", rows(y)}, {"tokens", rows(tokens)}})).backward();
      optimizer.step();
    }
  const auto want = weights_of(net);
  std::vector<double> first;
  for (int workers = 1; workers <= world().size(); ++workers)
    for (const std::optional<int> parts : {std::optional<int>(), std::optional(12)}) {
      if (parts && 12 % workers != 0) continue;
      const auto name = (parts ? "virtual" : "plain") + std::to_string(workers);
      const auto have = trained_on_tokens(name, workers, parts);
      if (world().rank() >= workers) continue;
      ASSERT_EQ(have.size(), want.size());
      for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(have[i], want[i], 1e-12) << name;
      if (parts && first.empty()) first = have;
      if (parts) {
        EXPECT_EQ(have, first) << "the same bits, " << name;
      }
    }
}

TEST(VirtualWorkers, WhatTheyCannotDoIsRefused) {
  const auto storage = test::shared_folder();
  const auto attempt = [&](const std::string& name, int virtual_workers,
                           const std::function<void(Session&, const Config&)>& loop) {
    return run({storage,
                {},
                {.scaling_config = {.virtual_workers = virtual_workers},
                 .run_config = {.name = name},
                 .datasets = {{"train", data_of({})}}}},
               loop)
        .first;
  };
  const int size = world().size();
  if (size > 1) {
    EXPECT_EQ(attempt("odd", size + 1, [](Session&, const Config&) {}), 64);
  }
  EXPECT_EQ(attempt("loader", size,
                    [](Session& session, const Config&) {
                      prepare_data_loader(session, torch::data::datasets::TensorDataset(at::arange(4)));
                    }),
            64);
  EXPECT_EQ(attempt("no_sync", size, [](Session& session, const Config&) { static_cast<void>(session.no_sync()); }),
            64);
  const auto backward = [](torch::nn::Linear net) { net->forward(at::ones({2, 1})).sum().backward(); };
  EXPECT_EQ(attempt("outside", size,
                    [&](Session& session, const Config&) { backward(session.prepare_model(torch::nn::Linear(1, 1))); }),
            1);
  EXPECT_EQ(attempt("twice", 2 * size,
                    [&](Session& session, const Config&) {
                      const auto net = session.prepare_model(torch::nn::Linear(1, 1));
                      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
                        static_cast<void>(batch);
                        backward(net);
                        backward(net);
                      }
                    }),
            1);
  EXPECT_EQ(attempt("left_out", 2 * size,
                    [&](Session& session, const Config&) {
                      const auto net = session.prepare_model(torch::nn::Linear(1, 1));
                      bool first = true;
                      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
                        static_cast<void>(batch);
                        if (!std::exchange(first, false)) backward(net);
                      }
                    }),
            1);
  EXPECT_EQ(attempt("middle", 2 * size,
                    [](Session& session, const Config&) {
                      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
                        static_cast<void>(batch);
                        session.report({{"x", 1.0}});
                      }
                    }),
            1);
}

}  // namespace
}  // namespace muster::virtual_workers_test
