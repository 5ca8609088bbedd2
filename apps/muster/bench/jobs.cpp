// The jobs of benchmarks that compare whole processes. Each job runs on several ranks; rank 0 prints the result.
#include "bench.hpp"
#include "programs.hpp"
#include "rounds.hpp"
#include "step_cases.hpp"
#include "training.hpp"

#include <torch/nn/functional/loss.h>
#include <muster/data_parallel.hpp>
#include <muster/error.hpp>
#include <muster/mpi.hpp>
#include <muster/trainer.hpp>

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

namespace muster::bench {
namespace {

std::int64_t now_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

void print_done() { std::cout << nlohmann::json{{"done_ns", now_ns()}} << std::endl; }

/// Computes the median time of a step on each rank; rank 0 prints the largest of these medians.
void time_steps(Training training, const Communicator& ranks, int steps) {
  for (int i = 0; i < warm_up_steps; ++i) training.step();
  std::vector<double> ms;
  auto last = Clock::now();
  for (int i = 0; i < steps; ++i) {
    training.step();
    const auto now = Clock::now();
    ms.push_back(std::chrono::duration<double, std::milli>(now - last).count());
    last = now;
  }
  const double slowest = ranks.all_reduce(median(ms), ReduceOp::max);
  if (ranks.rank() == 0) std::cout << nlohmann::json{{"step_ms", slowest}} << std::endl;
}

void first_step(Session& session) {
  Training training(session.prepare_model(fresh_model("mlp")), random_batches(session.world_rank(), 64));
  training.step();
  session.barrier();
  if (session.world_rank() == 0) print_done();
}

/// Saves every 20 steps. In the first start, the last rank writes the time to `note` after 70 steps and kills itself.
/// In the second start, rank 0 prints that time and the time at the end of the first step.
void lose_a_rank(Session& session, const std::filesystem::path& note) {
  const auto model = session.prepare_model(fresh_model("mlp"));
  auto optimizer = session.prepare_optimizer(momentum_sgd(*model));
  const auto batches = random_batches(session.world_rank(), 64);
  std::int64_t steps = 0;
  auto state = session.state({{"model", model}, {"optimizer", optimizer}, {"steps", steps}});
  const bool goes_on = state.restore();
  for (;;) {
    const auto& batch = batches[static_cast<std::size_t>(steps) % batches.size()];
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model->forward(batch.images), batch.labels).backward();
    optimizer.step();
    ++steps;
    if (goes_on) break;
    if (steps % 20 == 0) session.report({{"steps", steps}}, state);
    if (steps < 70 || session.world_rank() + 1 < session.world_size()) continue;
    std::ofstream(note) << now_ns() << std::flush;
    ::raise(SIGKILL);
  }
  session.barrier();
  if (session.world_rank() != 0) return;
  const auto done = now_ns();
  std::int64_t killed = 0;
  std::ifstream(note) >> killed;
  std::cout << nlohmann::json{{"done_ns", done}, {"killed_ns", killed}} << std::endl;
}

/// Runs lose_a_rank() as a run with a name in the benchmark's folder, so that the second start finds it; the benchmark
/// removes the folder at the end.
void recover(Launch& launch) {
  const char* const folder = std::getenv(folder_variable);
  if (folder == nullptr)
    throw Error(ExitCode::usage, "running a job of a benchmark", "this one is started by muster bench recovery",
                "Start that");
  const std::filesystem::path storage(folder), note = storage / "killed";
  const auto result = TorchTrainer(launch, [&](Session& session) { lose_a_rank(session, note); },
                                   {.run_config = {.name = "recovery", .storage_path = storage}})
                          .fit();
  if (result.error) throw *result.error;
  if (launch.rank() == 0) std::filesystem::remove_all(storage / "recovery");
}

/// Measures the steps of a program that has its own loop and no Launch.
void time_own_loop(bool prepared, int steps) {
  MPI_Init(nullptr, nullptr);
  {
    const auto ranks = from_mpi(MPI_COMM_WORLD);
    const auto& job = step_case(own_loop_base_case);
    const auto model = fresh_model(job.model);
    DataParallel parallel(ranks, model);
    auto batches = random_batches(ranks.rank(), job.batch_size);
    time_steps(prepared ? Training(model, std::move(batches), prepared_sgd(parallel, *model))
                        : Training(model, std::move(batches)),
               ranks, steps);
  }
  MPI_Finalize();
}

/// The least that a job of this program does: it starts MPI. libtorch is loaded, since the program is linked with it.
void start_mpi_only() {
  int rank = 0;
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) print_done();
  MPI_Finalize();
}

}  // namespace

void run_job(const std::string& name, const std::vector<std::string>& arguments) {
  if (name == "load") return start_mpi_only();
  if (name == "own-loop" && arguments.size() == 2)
    return time_own_loop(arguments[0] == own_loop_prepared_case, std::stoi(arguments[1]));
  run_in_launch([&](Launch& launch) {
    if (name == "recovery") return recover(launch);
    in_session(launch, name, [&](Session& session) {
      if (name == "first-step") return first_step(session);
      if (name == "checkpoint" && arguments.size() == 1) return time_checkpoints(session, arguments[0]);
      if (name == "step" && arguments.size() == 2)
        return time_steps({session.prepare_model(fresh_model(step_case(arguments[0]).model)),
                           random_batches(session.world_rank(), step_case(arguments[0]).batch_size)},
                          session.communicator(), std::stoi(arguments[1]));
      throw Error(ExitCode::usage, "running a job of a benchmark", "there is no job " + name);
    });
  });
}

}  // namespace muster::bench
