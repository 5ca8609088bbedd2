// The jobs that whole-process benchmarks run, each on several ranks; rank 0 prints the result.
#include "bench.hpp"
#include "rounds.hpp"
#include "step_cases.hpp"
#include "training.hpp"

#include <muster/error.hpp>
#include <muster/mpi.hpp>

#include <chrono>
#include <iostream>
#include <string>

namespace muster::bench {
namespace {

using Clock = std::chrono::steady_clock;

void print_done() {
  const auto now = std::chrono::nanoseconds(Clock::now().time_since_epoch());
  std::cout << nlohmann::json{{"done_ns", now.count()}} << std::endl;
}

/// Median of the steps' times, that of the slowest rank.
void time_steps(Session& session, const StepCase& job, int steps) {
  Training training(session.prepare_model(fresh_model(job.model)),
                    random_batches(session.world_rank(), job.batch_size));
  for (int i = 0; i < warm_up_steps; ++i) training.step();
  std::vector<double> ms;
  auto last = Clock::now();
  for (int i = 0; i < steps; ++i) {
    training.step();
    const auto now = Clock::now();
    ms.push_back(std::chrono::duration<double, std::milli>(now - last).count());
    last = now;
  }
  const double slowest = session.communicator().all_reduce(median(ms), ReduceOp::max);
  if (session.world_rank() == 0) std::cout << nlohmann::json{{"step_ms", slowest}} << std::endl;
}

void first_step(Session& session) {
  Training training(session.prepare_model(fresh_model("mlp")), random_batches(session.world_rank(), 64));
  training.step();
  session.barrier();
  if (session.world_rank() == 0) print_done();
}

/// libtorch has been loaded with this program.
void load() {
  int rank = 0;
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) print_done();
  MPI_Finalize();
}

}  // namespace

void run_job(const std::string& name, const std::vector<std::string>& arguments) {
  if (name == "load") return load();
  launched([&](Launch& launch) {
    in_session(launch, name, [&](Session& session) {
      if (name == "first-step") return first_step(session);
      if (name == "step" && arguments.size() == 2)
        return time_steps(session, step_case(arguments[0]), std::stoi(arguments[1]));
      throw Error(ExitCode::usage, "running a job of a benchmark", "there is no job " + name);
    });
  });
}

}  // namespace muster::bench
