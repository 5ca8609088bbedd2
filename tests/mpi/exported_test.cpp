// Exported programs: trained as any other model, on any number of ranks.
#include "muster/exported.hpp"

#include "muster/error.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::exported_test {
namespace {

namespace fs = std::filesystem;
using test::run;
using test::world;

/// A linear layer, batch-norm, dropout and another linear layer. Its dimension 0 is dynamic.
const fs::path file = fs::path(MUSTER_TEST_EXPORTED) / "line.pt2";

/// The same as a module of C++, with the same weights.
torch::nn::Sequential twin() {
  torch::nn::Sequential net(torch::nn::Linear(1, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
                            torch::nn::Dropout(0.2), torch::nn::Linear(8, 1));
  load_state_dict(net, state_dict(load_exported(file)));
  return net;
}

void expect_same_state(const StateDict& have, const StateDict& want, const std::string& what) {
  ASSERT_EQ(have.tensors.size(), want.tensors.size()) << what;
  for (const auto& [name, tensor] : want.tensors)
    EXPECT_TRUE(have.tensors.contains(name) && at::equal(have.tensors.at(name), tensor)) << what << ", " << name;
}

int job(const std::string& name, const fs::path& storage, const std::function<void(Session&)>& loop) {
  return run({storage, {}, {.run_config = {.name = name}, .datasets = {{"train", test::line()}}}},
             [&](Session& session, const Config&) { loop(session); })
      .first;
}

struct Way {
  std::string name;
  Fuse fuse = Fuse::never;
  bool accumulate = false, sync_batch_norm = false, bfloat16 = false;
};

/// Trains for two epochs. Returns the state, and then the outputs in evaluation.
template <class Model>
std::pair<StateDict, at::Tensor> trained(Session& session, Model model, const Way& way) {
  at::manual_seed(static_cast<std::uint64_t>(session.world_rank()));  // the same dropouts in both models
  auto net = session.prepare_model(std::move(model), {.sync_batch_norm = way.sync_batch_norm});
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05), {.fuse = way.fuse});
  EMA ema(net, {.decay = 0.9});
  for (int epoch = 0; epoch < 2; ++epoch)
    for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 4})) {
      optimizer.zero_grad();
      const auto loss = [&] {
        const auto scope = session.autocast({.enabled = way.bfloat16});
        return torch::mse_loss(net->forward(batch["x"]).to(at::kFloat), batch["y"]);
      };
      if (way.accumulate) {
        const auto scope = session.no_sync();
        loss().backward();
      }
      loss().backward();
      optimizer.step();
      ema.update();
    }
  auto state = state_dict(net);
  for (auto& [name, tensor] : state.tensors) tensor = tensor.detach().clone();
  for (const auto& [name, tensor] : state_dict(ema).tensors) state.tensors["ema/" + name] = tensor.detach().clone();
  const auto evaluation = session.evaluation(net);
  return {state, net->forward(at::linspace(0, 1, 5).unsqueeze(1)).detach()};
}

TEST(Exported, IsTrainedAsAModuleOfCpp) {
  const auto storage = test::shared_folder();
  for (const auto& way :
       {Way{"plain"}, Way{"fused", Fuse::always}, Way{"accumulated", Fuse::always, true},
        Way{"synchronised", Fuse::never, false, true}, Way{"autocast", Fuse::always, false, false, true}})
    EXPECT_EQ(job(way.name, storage,
                  [&](Session& session) {
                    const auto [have, outputs] = trained(session, load_exported(file), way);
                    const auto [want, of_twin] = trained(session, twin(), way);
                    expect_same_state(have, want, way.name);
                    EXPECT_TRUE(at::equal(outputs, of_twin)) << way.name;
                    EXPECT_FALSE(at::equal(have.tensors.at("0.weight"), twin()->named_parameters()["0.weight"]));
                  }),
              0)
        << way.name;
}

TEST(Exported, CountsBatchesOnlyInTraining) {
  auto net = load_exported(file);
  const auto count = [&] { return net->named_buffers()["1.num_batches_tracked"].item<std::int64_t>(); };
  const auto x = at::linspace(0, 1, 6).unsqueeze(1);
  net->forward(x);
  net->eval();
  EXPECT_TRUE(at::equal(net->forward(x), net->forward(x)));
  EXPECT_EQ(count(), 1);
  net->train();
  EXPECT_FALSE(at::equal(net->forward(x), net->forward(x)));
  EXPECT_EQ(count(), 3);
}

TEST(Exported, HasTheModulesOfPythonsNames) {
  auto net = load_exported(file);
  EXPECT_EQ(net->named_children().keys(), (std::vector<std::string>{"0", "1", "4"}));
  for (auto& parameter : net->named_children()["0"]->parameters()) parameter.set_requires_grad(false);
  net->forward(at::ones({3, 1})).sum().backward();
  for (const auto& item : net->named_parameters())
    EXPECT_EQ(item.value().grad().defined(), !item.key().starts_with("0.")) << item.key();

  auto other = load_exported(file);
  for (auto& parameter : other->parameters()) parameter.detach().fill_(0.5);
  load_state_dict(net, state_dict(other));
  expect_same_state(state_dict(net), state_dict(other), "loaded");
  EXPECT_TRUE(at::equal(net->named_parameters()["4.bias"], at::full({1}, 0.5)));
}

TEST(Exported, TiedWeightsAreOneParameter) {
  const auto storage = test::shared_folder();
  const auto tied = fs::path(MUSTER_TEST_EXPORTED) / "torch-2.13.pt2";
  const auto steps = [](ExportedModule& net, const auto& optimizer_step) {
    at::manual_seed(1);  // all ranks have the same batches and dropouts
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      net->forward(at::sin(at::arange(60, at::kFloat) + step).view({5, 2, 6})).square().sum().backward();
      optimizer_step();
    }
    return state_dict(net);
  };
  auto plain = load_exported(tied);
  const auto want = steps(plain, [&] {
    const at::NoGradGuard no_grad;
    for (const auto& item : plain->named_parameters())
      if (item.key() != "decoder.weight") item.value().sub_(item.value().grad(), 0.01);
  });
  for (const auto fuse : {Fuse::never, Fuse::always}) {
    const std::string name = fuse == Fuse::always ? "fused" : "plain";
    const auto loop = [&](Session& session) {
      auto net = session.prepare_model(load_exported(tied));
      auto sgd = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.01), {.fuse = fuse});
      const auto have = steps(net, [&] { sgd.step(); });
      for (const auto& [key, tensor] : want.tensors)
        EXPECT_TRUE(at::allclose(have.tensors.at(key), tensor, 1e-5, 1e-6)) << name << ", " << key;
      EXPECT_TRUE(net->named_parameters()["encoder.weight"].is_same(net->named_parameters()["decoder.weight"]));
    };
    EXPECT_EQ(job("tied " + name, storage, loop), 0);
  }
}

/// Trains on so many workers up to `epochs`, from where the run of that name is.
StateDict on_workers(const fs::path& storage, const std::string& name, int workers, std::int64_t epochs) {
  const auto x = at::arange(48, at::kFloat).unsqueeze(1) / 48;
  const TorchTrainerOptions options{.train_loop_config = {{"epochs", 0}},
                                    .scaling_config = {.num_workers = workers, .virtual_workers = 12},
                                    .run_config = {.name = name},
                                    .datasets = {{"train", Dataset::from_tensors({{"x", x}, {"y", 3 * x - 1}})}}};
  const auto [code, result] =
      run({storage, {"--set", "epochs=" + std::to_string(epochs)}, options}, [&](Session& session, const Config&) {
        auto net = session.prepare_model(load_exported(file));
        auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05));
        auto state = session.state({{"model", net}, {"optimizer", optimizer}});
        state.restore();
        auto shard = session.get_dataset_shard("train");
        for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
          for (auto& batch : shard.iter_torch_batches({.batch_size = 2, .shuffle = true})) {
            optimizer.zero_grad();
            torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
            optimizer.step();
          }
          session.report({}, state);
        }
      });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(result && result->checkpoint);
  return result->checkpoint->to_dict();
}

TEST(Exported, GoesOnExactlyOnAnotherNumberOfRanks) {
  const auto storage = test::shared_folder();
  const auto want = on_workers(storage, "whole", 1, 3);
  expect_same_state(on_workers(storage, "all", world().size(), 3), want, "on all ranks");
  on_workers(storage, "changed", world().size(), 1);
  on_workers(storage, "changed", std::max(1, world().size() - 1), 2);
  expect_same_state(on_workers(storage, "changed", world().size(), 3), want, "on other ranks than before");
}

}  // namespace
}  // namespace muster::exported_test
