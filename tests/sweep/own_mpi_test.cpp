// A program that has MPI already, as a simulation does, and trains on some of its ranks while the others go on.
#include "muster/mpi.hpp"
#include "muster/muster.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::own_mpi_test {
namespace {

using test::world;

/// The ranks of the program, of which the first half trains.
class Simulation {
 public:
  Simulation() {
    MPI_Comm_dup(MPI_COMM_WORLD, &all_);
    MPI_Comm_split(all_, trains() ? 0 : 1, world().rank(), &half_);
  }
  ~Simulation() {
    MPI_Comm_free(&half_);
    MPI_Comm_free(&all_);
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  static int trainers() { return (world().size() + 1) / 2; }
  static bool trains() { return world().rank() < trainers(); }
  MPI_Comm half() const { return half_; }

  /// On the ranks that do not train: computes until it receives training's exit code.
  int compute() const {
    int code = -1, heard = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Irecv(&code, 1, MPI_INT, 0, end, all_, &request);
    while (heard == 0) {
      double value = 1, sum = 0;
      MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, half_);
      EXPECT_EQ(sum, world().size() - trainers());
      answer();
      MPI_Test(&request, &heard, MPI_STATUS_IGNORE);
      MPI_Allreduce(MPI_IN_PLACE, &heard, 1, MPI_INT, MPI_MIN, half_);
    }
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    return code;
  }
  /// In training, on the first rank: receives messages that the other ranks compute.
  void ask() const {
    if (world().size() == trainers()) return;
    int word = 17;
    MPI_Send(&word, 1, MPI_INT, trainers(), question, all_);
    MPI_Recv(&word, 1, MPI_INT, trainers(), question, all_, MPI_STATUS_IGNORE);
    EXPECT_EQ(word, 18);
  }
  /// On the first rank.
  void tell_end(int code) const {
    for (int rank = trainers(); rank < world().size(); ++rank) MPI_Send(&code, 1, MPI_INT, rank, end, all_);
  }
  /// All ranks are alive, and MPI works.
  void meet() const {
    int count = 1;
    MPI_Allreduce(MPI_IN_PLACE, &count, 1, MPI_INT, MPI_SUM, all_);
    EXPECT_EQ(count, world().size());
  }

 private:
  static constexpr int question = 1, end = 2;

  void answer() const {
    int there = 0, word = 0;
    if (world().rank() == trainers()) MPI_Iprobe(0, question, all_, &there, MPI_STATUS_IGNORE);
    if (there == 0) return;
    MPI_Recv(&word, 1, MPI_INT, 0, question, all_, MPI_STATUS_IGNORE);
    ++word;
    MPI_Send(&word, 1, MPI_INT, 0, question, all_);
  }

  MPI_Comm all_ = MPI_COMM_NULL, half_ = MPI_COMM_NULL;
};

/// Trains on the first half while the others compute; the exit code, on all ranks.
int train(const Simulation& simulation, const std::filesystem::path& storage, std::vector<std::string> flags,
          const std::function<void(Session&)>& loop) {
  if (!Simulation::trains()) return simulation.compute();
  std::vector<std::string> words{"simulation",  "--storage", storage.string(), "--progress", "none",
                                 "--log-level", "off"};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  int code = -1;
  {
    Launch launch(static_cast<int>(argv.size()), argv.data(), from_mpi(simulation.half()));
    EXPECT_EQ(launch.size(), Simulation::trainers());
    EXPECT_EQ(launch.rank(), world().rank());
    code = launch.run([&] {
      return TorchTrainer(launch, loop, {.run_config = {.name = "run"}, .datasets = {{"train", test::line()}}}).fit();
    });
  }
  if (world().rank() == 0) simulation.tell_end(code);
  return code;
}

void epochs(Session& session, std::int64_t count, const std::function<void(std::int64_t)>& each) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  for (auto epoch : session.epochs(count)) {
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 8})) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
    }
    each(epoch);
    session.report({{"epoch", epoch}}, state);
  }
}

using Handler = void (*)(int);
Handler handler_of(int signal) {
  struct sigaction now {};
  ::sigaction(signal, nullptr, &now);
  return now.sa_handler;
}
void own_handler(int) {}

TEST(OwnMpi, HalfOfTheRanksTrainsAndTheOthersGoOn) {
  const Simulation simulation;
  const auto storage = test::shared_folder();
  const auto before = handler_of(SIGUSR1);
  std::int64_t trained = 0;
  const auto loop = [&](std::int64_t count) {
    return [&, count](Session& session) {
      EXPECT_EQ(session.world_size(), Simulation::trainers());
      epochs(session, count, [&](std::int64_t) {
        ++trained;
        if (session.world_rank() == 0) simulation.ask();
      });
    };
  };
  EXPECT_EQ(train(simulation, storage, {}, loop(3)), 0);
  simulation.meet();
  EXPECT_EQ(trained, Simulation::trains() ? 3 : 0);
  EXPECT_EQ(handler_of(SIGUSR1), before);

  // Another launch continues the run with other settings.
  EXPECT_EQ(train(simulation, storage, {"--resume", "must", "--seed", "3"}, loop(5)), 0);
  simulation.meet();
  int finalized = 1;
  MPI_Finalized(&finalized);
  EXPECT_FALSE(finalized);
}

TEST(OwnMpi, AnErrorEndsTheLaunchAndNotTheProgram) {
  const Simulation simulation;
  const auto storage = test::shared_folder();
  const auto fails = [&](Session& session) {
    epochs(session, 2, [&](std::int64_t) {
      if (session.world_rank() == session.world_size() - 1) throw std::runtime_error("the loss is a teapot");
    });
  };
  EXPECT_EQ(train(simulation, storage, {}, fails), 1);
  simulation.meet();
  EXPECT_EQ(train(simulation, storage, {"--no-such-flag"}, fails), 64);
  simulation.meet();
  EXPECT_EQ(train(simulation, storage, {"--time-limit", "0"}, [](Session& s) { epochs(s, 9, [](std::int64_t) {}); }),
            85);
  simulation.meet();
  EXPECT_EQ(train(simulation, storage, {}, [](Session& s) { epochs(s, 2, [](std::int64_t) {}); }), 0);
  simulation.meet();
}

TEST(OwnMpi, SignalsStayTheProgramsWhereItHasHandlers) {
  const Simulation simulation;
  const auto before = handler_of(SIGUSR2);
  ::signal(SIGUSR2, own_handler);
  Handler during = nullptr, other = nullptr;
  EXPECT_EQ(train(simulation, test::shared_folder(), {},
                  [&](Session&) {
                    during = handler_of(SIGUSR2);
                    other = handler_of(SIGUSR1);
                  }),
            0);
  if (Simulation::trains()) {
    EXPECT_EQ(during, own_handler);
    EXPECT_NE(other, SIG_DFL);
  }
  EXPECT_EQ(handler_of(SIGUSR2), own_handler);
  ::signal(SIGUSR2, before);
  simulation.meet();
}

TEST(OwnMpi, APartOfACommunicatorIsALaunchsWorldToo) {
  const auto part = world().split(world().rank() % 2);
  char name[] = "program";
  char* argv[] = {name};
  Launch launch(1, argv, part);
  EXPECT_EQ(launch.size(), part.size());
  int sum = 0;
  EXPECT_EQ(launch.run([&] {
    sum = static_cast<int>(launch.communicator().all_reduce(std::int64_t{1}));
    return world().rank() % 2 == 1 ? 7 : 0;  // the other part has its own
  }),
            world().rank() % 2 == 1 ? 7 : 0);
  EXPECT_EQ(sum, part.size());
  world().barrier();
}

TEST(OwnMpi, PartsThatBeginAtTheSameTimeHaveRunsOfTheirOwn) {
  const auto storage = test::shared_folder();
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, world().rank() % 2, world().rank(), &part);
  std::vector<std::string> words{"program", "--storage", storage.string(), "--progress", "none", "--log-level", "off"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  for (int i = 0; i < 5; ++i) {
    Launch launch(static_cast<int>(argv.size()), argv.data(), from_mpi(part));
    world().barrier();
    EXPECT_EQ(launch.run([&] { return TorchTrainer(launch, [](Session&) {}).fit(); }), 0);
  }
  MPI_Comm_free(&part);
  world().barrier();
  const auto runs = std::distance(std::filesystem::directory_iterator(storage), std::filesystem::directory_iterator());
  EXPECT_EQ(runs, world().size() == 1 ? 5 : 10);
  world().barrier();
}

TEST(OwnMpi, TwoPartsTrainAtTheSameTime) {
  const auto storage = test::shared_folder();
  const bool odd = world().rank() % 2 == 1;
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, odd ? 1 : 0, world().rank(), &part);
  std::vector<std::string> words{"program",    "--storage", storage.string(), "--name", odd ? "odd" : "even",
                                 "--progress", "none",      "--log-level",    "off"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  int failures = 0;
  std::int64_t trials = 0;
  {
    Launch launch(static_cast<int>(argv.size()), argv.data(), from_mpi(part));
    const auto loop = [&](Session& session, const Config&) {
      if (session.experiment_name().starts_with("trial")) ++trials;
      epochs(session, 3, [&](std::int64_t epoch) {
        if (odd || epoch != 1 || failures++ > 0) return;
        if (session.world_rank() == session.world_size() - 1) throw std::runtime_error("the loss is a teapot");
        session.barrier();
      });
    };
    TorchTrainer trainer(launch, loop,
                         {.train_loop_config = {{"x", 0}},
                          .run_config = {.failure_config = {.max_failures = 1}},
                          .datasets = {{"train", test::line()}}});
    const auto code = launch.run([&] {
      auto result = trainer.fit();
      EXPECT_EQ(result.metrics.at("training_iteration"), 3);
      if (odd || std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) return result;
      result.error = Sweep(launch, trainer.as_trainable(), {.space = {{"x", grid({1, 2, 3})}}}).fit().error;
      return result;
    });
    EXPECT_EQ(code, 0);
  }
  MPI_Comm_free(&part);
  std::vector<std::int64_t> all{trials};
  world().all_reduce(std::span(all));
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") == nullptr) {
    EXPECT_EQ(all[0], 3) << "each on a rank of the even ones";
  }
  for (const std::string name : {"even", "odd"}) {
    if (name == "odd" && world().size() == 1) continue;
    const auto result = Result::from_path(storage / name);
    EXPECT_FALSE(result.error) << name;
    EXPECT_EQ(result.metrics_history.size(), 3u) << name;
  }
  world().barrier();
}

TEST(OwnMpi, WhatCannotWorkIsRefused) {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  std::optional<Error> error;
  std::thread([&] {
    try {
      from_mpi(MPI_COMM_SELF);
    } catch (const Error& thrown) {
      error = thrown;
    }
  }).join();
  EXPECT_EQ(error.has_value(), level < MPI_THREAD_SERIALIZED);
  if (!error) return;
  EXPECT_EQ(error->code(), ExitCode::usage);
  EXPECT_NE(std::string(error->what()).find("MPI was initialised for its main thread"), std::string::npos);
}

}  // namespace
}  // namespace muster::own_mpi_test
