// Rows of Ray Train's trainer: the workers, their data, and user-defined trainers. With any number of ranks.
#include "support/job.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::train_api_test {
namespace {

using test::run;
using test::shared_folder;
using test::world;

TEST(TrainRow, ScalingConfig) {
  const int ranks = world().size();
  const auto fit = [&](const ScalingConfig& scaling) {
    TorchTrainerOptions options{.scaling_config = scaling, .run_config = {.name = "run"}};
    int workers = 0, threads = 0;
    const auto code = run({shared_folder(), {}, options}, [&](Session& session, const Config&) {
                        workers = session.world_size();
                        threads = at::get_num_threads();
                        session.report({{"workers", workers}});
                      }).first;
    if (code != 0) return std::pair(-code, 0);
    EXPECT_EQ(workers > 0, world().rank() < world().all_reduce(std::int64_t{workers}, ReduceOp::max))
        << "the others wait";
    return std::pair(static_cast<int>(world().all_reduce(std::int64_t{workers}, ReduceOp::max)),
                     static_cast<int>(world().all_reduce(std::int64_t{threads}, ReduceOp::max)));
  };
  EXPECT_EQ(fit({}).first, ranks) << "all";
  EXPECT_EQ(fit({.num_workers = 1}).first, 1);
  EXPECT_EQ(fit({.num_workers = ranks}).first, ranks);
  EXPECT_EQ(fit({.num_workers = {1, 2}}).first, std::min(2, ranks));
  EXPECT_EQ(fit({.num_workers = {1, 2}, .threads_per_worker = 2}).second, 2);
  EXPECT_EQ(fit({.num_workers = ranks + 1}).first, -static_cast<int>(ExitCode::usage)) << "more than there are";
  EXPECT_EQ(fit({.num_workers = {ranks + 1, ranks + 2}}).first, -static_cast<int>(ExitCode::usage));
}

/// Its framework needs the number of workers; the field is the user's.
struct Greeting : Backend {
  explicit Greeting(std::string word_, std::vector<std::string>& said_) : word(std::move(word_)), said(said_) {}
  void on_start(Session&) override { said.push_back("start"); }
  void on_training_start(Session&) override { said.push_back(word); }
  void on_shutdown(Session&) override { said.push_back("shutdown"); }
  std::string word;
  std::vector<std::string>& said;
};
struct GreetingConfig : BackendConfig {
  std::unique_ptr<Backend> make_backend() const override { return std::make_unique<Greeting>(word, *said); }
  std::string word = "hello";
  std::vector<std::string>* said = nullptr;
};

/// A trainer with its own training function, backend and split; setup() decides on the data.
struct Predefined : DataParallelTrainer {
  explicit Predefined(Launch& launch, TrainerOptions options = {})
      : DataParallelTrainer(
            launch,
            [](Session& session) {
              std::int64_t samples = 0;
              for (const auto& batch : session.get_dataset_shard("valid").iter_torch_batches({.batch_size = 1}))
                samples += batch.size();
              session.report({{"samples", samples}});
            },
            std::move(options)) {}
  void setup() override {
    options_.datasets.emplace("valid", Dataset::from_tensors({{"x", at::ones({2 * launch().size(), 1})}}));
  }
  DataConfig default_dataset_config() const override { return {.datasets_to_split = {"valid"}}; }
};

TEST(TrainRow, DataParallelTrainer) {
  std::vector<std::string> said;
  auto config = std::make_shared<GreetingConfig>();
  config->said = &said;
  const auto [code, result] = test::launch({shared_folder()}, [&](Launch& launch) {
    Predefined trainer(launch, {.backend_config = config, .run_config = {.name = "own"}});
    EXPECT_EQ(trainer.get_dataset_config().datasets_to_split, std::vector<std::string>{"valid"});
    return trainer.fit();
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(result->metrics.at("samples"), 2) << "its share";
  EXPECT_EQ(said, (std::vector<std::string>{"start", "hello", "shutdown"}));
  const auto whole = test::launch({shared_folder()}, [](Launch& launch) {
    return Predefined(launch, {.dataset_config = {.datasets_to_split = {"train"}}, .run_config = {.name = "own"}})
        .fit();
  });
  EXPECT_EQ(whole.second->metrics.at("samples"), 2 * world().size()) << "what is given wins";
}

}  // namespace
}  // namespace muster::train_api_test
