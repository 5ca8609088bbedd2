// as_trainable: a trainer becomes what a sweep runs for each of its trials. At any number of ranks.
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

namespace muster {
namespace {

using test::line;
using test::shared_folder;
using test::world;

void fit_line(Session& session, const Config& config) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(net->parameters(), config.at("lr").get<double>());
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    Mean loss;
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = 16})) {
      optimizer.zero_grad();
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    session.report({{"loss", loss}}, state);
  }
}

/// A trainer of a user's own, whose setup() decides for each trial.
struct OwnTrainer : TorchTrainer {
  using TorchTrainer::TorchTrainer;
  void setup() override {
    sizes.push_back(launch().size());
    options_.metadata = {{"lr", options_.train_loop_config.at("lr")}};
  }
  std::vector<int> sizes;
};

TEST(TrainRow, AsTrainable) {
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) GTEST_SKIP() << "sweeps need MPI_THREAD_MULTIPLE";
  const int together = world().size() == 1 ? 1 : 2;
  const auto storage = shared_folder();
  std::vector<std::string> words{"job",        "--storage", storage.string(), "--name", "sweep",
                                 "--progress", "none",      "--log-level",    "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  std::optional<SweepResult> sweep;
  {
    Launch launch(static_cast<int>(argv.size()), argv.data());
    EXPECT_EQ(launch.run([&] {
      OwnTrainer trainer(launch, fit_line,
                         {.train_loop_config = {{"lr", 0.5}, {"epochs", 4}}, .datasets = {{"train", line()}}});
      sweep = Sweep(launch, trainer.as_trainable(),
                    {.space = {{"lr", grid({0.001, 0.1, 0.01})}},
                     .ranks_per_trial = together,
                     .metric = "loss",
                     .mode = ScoreOrder::min})
                  .fit();
      for (const int size : trainer.sizes) EXPECT_EQ(size, together) << "launch() is the trial's";
      // Afterwards it is what it was before, for all ranks, and its run lies beside the trials.
      const auto result = trainer.fit();
      EXPECT_EQ(trainer.sizes.back(), world().size());
      return result;
    }),
              0);
  }
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials.size(), 3u);
  const auto best = sweep->best();
  ASSERT_TRUE(best);
  EXPECT_EQ(best->config, Json({{"lr", 0.1}}));
  EXPECT_EQ(best->metrics.at("training_iteration"), 4);
  ASSERT_TRUE(best->checkpoint);
  EXPECT_EQ(best->checkpoint->get_metadata(), Json({{"lr", 0.1}})) << "setup() saw the trial's settings";

  // The same training alone comes to the same loss.
  const auto alone = test::launch({storage, {"--workers", std::to_string(together)}}, [&](Launch& launch) {
    return TorchTrainer(launch, fit_line,
                        {.train_loop_config = {{"lr", 0.1}, {"epochs", 4}},
                         .run_config = {.name = "alone"},
                         .datasets = {{"train", line()}}})
        .fit();
  });
  EXPECT_EQ(alone.second->metrics.at("loss"), best->metrics.at("loss"));
}

}  // namespace
}  // namespace muster
