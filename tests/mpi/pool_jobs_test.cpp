// Whole jobs use their MPI communicators again: dozens of failed attempts, runs and trials make no more of them than
// the first few. MUSTER_TEST_ROUNDS sets how many there are.
#include "comm/pool.hpp"
#include "support/job.hpp"

#include "muster/muster.hpp"
#include "muster/sweep.hpp"
#include "muster/validation.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::pool_jobs_test {
namespace {

using detail::comm::num_mpi_communicators;
using test::world;

int num_rounds(int usual) {
  const char* const rounds = std::getenv("MUSTER_TEST_ROUNDS");
  return rounds == nullptr ? usual : std::stoi(rounds);
}

/// `counts`: the communicators at the beginning of each round. After the first rounds only so many may make new ones.
void expect_constant(const std::vector<std::int64_t>& counts, int rounds_with_new = 0) {
  constexpr std::size_t settled = 8;
  ASSERT_GT(counts.size(), settled);
  int grown = 0;
  for (auto round = settled + 1; round < counts.size(); ++round) grown += counts[round] > counts[round - 1];
  EXPECT_LE(grown, rounds_with_new) << testing::PrintToString(counts);
}

/// Uses what takes communicators: a model, a fused optimizer, a scaler, the process group, a checkpoint.
void train(Session& session, double& rounds, bool validates = false) {
  auto net = session.prepare_model(torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::Linear(8, 1)));
  auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.fuse = Fuse::always});
  auto scaler = session.grad_scaler();
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"rounds", rounds}});
  state.restore();
  optimizer.zero_grad();
  net->forward(torch::ones({4, 1})).sum().backward();
  optimizer.step();
  ++rounds;
  session.report({{"rounds", rounds}}, state, {.validation = validates});
}

/// What the other ranks do while one fails.
void wait_somewhere(Session& session, int round) {
  auto& group = *session.process_group();
  std::vector<at::Tensor> tensors{torch::ones({100'000})};
  switch (round % 5) {
    case 0:
      return session.barrier();
    case 1:
      return group.allreduce(tensors)->wait(), void();
    case 2:
      static_cast<void>(session.communicator().all_gather("stale"));
      return;
    case 3:
      return group.recv(tensors, (session.world_rank() + 1) % session.world_size(), 3)->wait(), void();
    default:
      static_cast<void>(group.allreduce(tensors));
      static_cast<void>(session.communicator().duplicate());
  }
}

void fail_often(const std::string& name, const TorchConfig& config, int workers) {
  const int attempts = num_rounds(30);
  TorchTrainerOptions options{.run_config = {.name = name}};
  options.torch_config = config;
  options.run_config.failure_config.max_failures = 1;
  options.run_config.checkpoint_config.num_to_keep = 1;
  options.scaling_config.num_workers = workers;
  std::vector<std::int64_t> counts;
  int attempt = 0;
  const auto [code, result] = test::run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    counts.push_back(num_mpi_communicators());
    double rounds = 0;
    train(session, rounds);
    if (++attempt == attempts) return;
    if (session.world_rank() == attempt % session.world_size()) {
      std::vector<at::Tensor> stale{torch::full({300}, -1)};
      static_cast<void>(session.process_group()->send(stale, (session.world_rank() + 1) % session.world_size(), 4));
      throw std::runtime_error("a passing trouble");
    }
    wait_somewhere(session, attempt);
    session.barrier();
  });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
  if (world().rank() >= workers) return;
  EXPECT_EQ(attempt, attempts);
  expect_constant(counts);
}

TEST(PoolOfJobs, FailedAttempts) { fail_often("attempts", {}, world().size()); }

TEST(PoolOfJobs, FailedAttemptsBesideARankThatDoesNotTrain) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  fail_often("spares", {}, world().size() - 1);
}

TEST(PoolOfJobs, FailedAttemptsOfGloo) {
  if (!has_backend("gloo")) GTEST_SKIP() << "built without gloo";
  fail_often("gloo", {.backend = "gloo"}, world().size());
}

TEST(PoolOfJobs, RunsOneAfterTheOther) {
  std::vector<std::int64_t> counts;
  const auto storage = test::shared_folder();
  for (int round = 0; round < num_rounds(20); ++round) {
    TorchTrainerOptions options{.run_config = {.name = "run_" + std::to_string(round)}};
    if (world().size() > 1) options.scaling_config.num_workers = world().size() - 1;
    options.validation.function = [](Session& session, const Checkpoint&) -> Config {
      session.barrier();
      return {{"validated", 1}};
    };
    const auto [code, result] = test::run({storage, {}, options}, [&](Session& session, const Config&) {
      double rounds = 0;
      train(session, rounds, /*validates=*/true);
    });
    EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
    counts.push_back(num_mpi_communicators());
  }
  // A validation may come beside training or after it, so what is in use at the same time depends on the moment.
  expect_constant(counts, /*rounds_with_new=*/3);
}

TEST(PoolOfJobs, TrialsOfASweep) {
  std::vector<std::int64_t> counts;
  const auto loop = [&](Session& session, const Config& config) {
    counts.push_back(num_mpi_communicators());
    double rounds = 0;
    train(session, rounds);
    const int trial = config.at("trial").get<int>();
    if (trial % 3 == 2 && session.world_rank() == trial % session.world_size())
      throw std::runtime_error("this trial fails");
    session.barrier();
  };
  const auto storage = test::shared_folder();
  std::vector<Json> numbers;
  for (int trial = 0; trial < num_rounds(40); ++trial) numbers.emplace_back(trial);
  const auto [code, sweep] = [&] {
    std::vector<std::string> words{"job", "--storage", storage.string(), "--progress", "none", "--log-level", "error"};
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    Launch launch(static_cast<int>(argv.size()), argv.data());
    std::optional<SweepResult> sweep;
    const int code = launch.run([&] {
      TorchTrainer trainer(launch, loop, {.train_loop_config = {{"trial", 0}}});
      return *(sweep = Sweep(launch, trainer.as_trainable(),
                             {.space = {{"trial", grid(numbers)}}, .ranks_per_trial = world().size()})
                           .fit());
    });
    return std::pair(code, sweep);
  }();
  EXPECT_EQ(code, 0);
  ASSERT_TRUE(sweep);
  EXPECT_EQ(counts.size(), numbers.size());
  expect_constant(counts);
}

}  // namespace
}  // namespace muster::pool_jobs_test
