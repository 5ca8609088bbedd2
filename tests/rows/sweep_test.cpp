// as_trainable: a trainer becomes what a sweep runs for each of its trials. At any number of ranks.
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::sweep_test {
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
      // Afterwards the trainer is unchanged on all ranks, and its run is beside the trials.
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

  // The same training on one process gives the same loss.
  const auto alone = test::launch({storage, {"--workers", std::to_string(together)}}, [&](Launch& launch) {
    return TorchTrainer(launch, fit_line,
                        {.train_loop_config = {{"lr", 0.1}, {"epochs", 4}},
                         .run_config = {.name = "alone"},
                         .datasets = {{"train", line()}}})
        .fit();
  });
  EXPECT_EQ(alone.second->metrics.at("loss"), best->metrics.at("loss"));
}

/// An operator that fits a line, and counts the batches that it trains on in this process.
struct Line : TrainingOperator {
  void setup(const Config& config) override {
    torch::nn::Linear net(1, 1);
    const auto lr = config.at("lr").get<double>();
    if (lr < 0) throw std::runtime_error("no such rate");
    register_training(Components{
        .models = net, .optimizers = torch::optim::SGD(net->parameters(), lr), .criterion = torch::nn::MSELoss()});
    register_data({line(), {.batch_size = 4}}, OperatorLoader(line(), {.batch_size = 10}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    ++batches;
    return TrainingOperator::train_batch(batch, info);
  }
  static inline int batches = 0;
};

std::optional<SweepResult> sweep_over(const std::filesystem::path& storage, const Trainable& trainable,
                                      SweepOptions options) {
  std::vector<std::string> words{"job",        "--storage", storage.string(), "--name", "operators",
                                 "--progress", "none",      "--log-level",    "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  options.ranks_per_trial = world().size() == 1 ? 1 : 2;
  std::optional<SweepResult> sweep;
  Launch launch(static_cast<int>(argv.size()), argv.data());
  launch.run([&] { sweep = Sweep(launch, trainable, options).fit(); });
  return sweep;
}

TEST(OperatorRow, AsTrainable) {
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) GTEST_SKIP() << "sweeps need MPI_THREAD_MULTIPLE";
  const auto trainable = OperatorTrainer<Line>::as_trainable({.config = {{"lr", 0.5}}}, 3);
  const auto sweep =
      sweep_over(shared_folder(), trainable,
                 {.space = {{"lr", grid({0.001, 0.1, -1, 0.01})}}, .metric = "val_loss", .mode = ScoreOrder::min});
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials.at(2).status, TrialStatus::failed);
  EXPECT_NE(std::string(sweep->trials.at(2).error->what()).find("no such rate"), std::string::npos);
  const auto best = sweep->best();
  ASSERT_TRUE(best);
  EXPECT_EQ(best->config, Json({{"lr", 0.1}}));
  const auto rows = Result::from_path(best->path).metrics_history;
  ASSERT_EQ(rows.size(), 3u) << "a report for each step";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    EXPECT_TRUE(row.contains("train_loss") && row.contains("val_loss") && row.contains("val_accuracy")) << row;
    EXPECT_EQ(row.at("epoch"), i + 1) << "as train() counts them";
  }
  EXPECT_LT(rows.back().at("val_loss").get<double>(), rows.front().at("val_loss").get<double>());
  torch::nn::Linear elsewhere(1, 1);
  best->checkpoint->load("model", elsewhere);
  const auto unknown = sweep_over(shared_folder(), trainable,
                                  {.space = {{"rate", grid({1})}}, .metric = "val_loss", .mode = ScoreOrder::min});
  EXPECT_NE(std::string(unknown->error->what()).find("rate"), std::string::npos);
}

TEST(OperatorRow, AsTrainableWithAStepOfOnesOwn) {
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) GTEST_SKIP() << "sweeps need MPI_THREAD_MULTIPLE";
  const auto storage = shared_folder();
  bool fails = true;
  const auto trainable = OperatorTrainer<Line>::as_trainable(
      [] { return std::make_unique<Line>(); }, {.config = {{"lr", 0.1}}}, 100,
      [&](OperatorTrainer<Line>& trainer, std::int64_t iteration) -> Json {
        const auto lr = trainer.get_local_operator().config().at("lr").get<double>();
        const auto loss = trainer.train({.num_steps = 2}).at("train_loss");
        if (fails && lr == 0.02 && iteration == 2 && trainer.get_local_operator().world_rank() == 0)
          throw std::runtime_error("over");
        Json step{{"loss", loss}, {"minus_lr", -lr}, {"iteration", iteration}};
        if (lr == 0.02) step["epoch"] = 100 + iteration;
        return step;
      });
  const SweepOptions options{.space = {{"lr", grid({0.01, 0.02})}},
                             .metric = "minus_lr",
                             .mode = ScoreOrder::max,
                             .scheduler = asha({.grace_period = 4, .max_t = 4})};
  auto sweep = sweep_over(storage, trainable, options);
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials[0].status, TrialStatus::done);
  EXPECT_EQ(sweep->trials[0].metrics.at("training_iteration"), 4) << "max_t is in steps";
  EXPECT_EQ(sweep->trials[1].status, TrialStatus::failed);
  EXPECT_EQ(Result::from_path(sweep->trials[1].path).metrics_history.size(), 2u);

  // It goes on at the step that has failed; earlier calls return their saved results.
  fails = false;
  Line::batches = 0;
  sweep = sweep_over(storage, trainable, options);
  ASSERT_TRUE(sweep);
  const auto& trial = sweep->trials[1];
  EXPECT_TRUE(trial.status == TrialStatus::done || trial.status == TrialStatus::stopped);
  const auto rows = Result::from_path(trial.path).metrics_history;
  ASSERT_EQ(rows.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[static_cast<std::size_t>(i)].at("iteration"), i);
    EXPECT_EQ(rows[static_cast<std::size_t>(i)].at("epoch"), 100 + i) << "the step's own";
  }
  EXPECT_GE(sweep->trials[0].metrics.at("epoch"), 1) << "the number of passes, from 1 on";
  EXPECT_EQ(world().all_reduce(std::int64_t{Line::batches}, ReduceOp::max), 2 * 2) << "two steps of two batches";
}

}  // namespace
}  // namespace muster::sweep_test
