// Whole runs over gloo.
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

namespace muster::gloo_training_test {
namespace {

using test::line;
using test::run;
using test::world;

class GlooTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_backend("gloo")) GTEST_SKIP() << "this build has no gloo: its headers were not there";
  }
};

TorchTrainerOptions train_on_line(std::string name) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", line()}}};
}

/// Trains a small net and returns its weights in one tensor. `each_step` may throw.
at::Tensor fit_line(Session& session, const std::function<void(std::int64_t)>& each_step = {}) {
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 1)));
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  auto shard = session.get_dataset_shard("train");
  for ([[maybe_unused]] auto epoch : session.epochs(2)) {
    Mean loss;
    for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
      optimizer.zero_grad();
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
      if (each_step) each_step(session.global_step());
    }
    EXPECT_NEAR(session.mean(torch::tensor(session.world_rank() + 1.0)).item<double>(),
                (session.world_size() + 1) / 2.0, 1e-12);
    auto scope = session.evaluation(net);
    session.report({{"loss", loss}}, state);
  }
  std::vector<at::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
  return at::cat(flat);
}

TEST_F(GlooTraining, GivesTheWeightsThatMpiGives) {
  const auto storage = test::shared_folder();
  std::map<std::string, at::Tensor> weights;
  for (const char* backend : {"mpi", "gloo"}) {
    const auto loop = [&](Session& session, const Config&) { weights[backend] = fit_line(session); };
    EXPECT_EQ(run({storage, {"--backend", backend}, train_on_line(backend)}, loop).first, 0);
  }
  EXPECT_TRUE(at::allclose(weights["gloo"], weights["mpi"], 1e-4, 1e-5)) << weights["gloo"] - weights["mpi"];
}

TEST_F(GlooTraining, OneRanksExceptionSurfacesOnAll) {
  auto options = train_on_line("bad");
  options.torch_config.backend = "gloo";
  const int bad = world().size() - 1;
  const auto [code, result] = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    fit_line(session, [&](std::int64_t step) {
      if (step == 2 && session.world_rank() == bad) throw std::runtime_error("bad sample 7");
    });
  });
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("bad sample 7"), std::string::npos) << result->error->what();
}

}  // namespace
}  // namespace muster::gloo_training_test
