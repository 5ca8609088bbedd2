// muster bench start and muster bench recovery: whole jobs, from their launch or from the SIGKILL of a rank, to the end
// of the next step.
#include "bench.hpp"
#include "peers.hpp"
#include "programs.hpp"

namespace muster::bench {
namespace {

/// Returns the time in milliseconds from the job's begin, or from the SIGKILL of a rank if there was one, to the end of
/// the step. The job prints the times by the clock that all processes of a machine share.
double since_begin(const Finished& finished, const nlohmann::ordered_json& result) {
  const std::chrono::nanoseconds done(result.at("done_ns").get<std::int64_t>());
  const std::chrono::nanoseconds begin(
      result.value("killed_ns", std::chrono::nanoseconds(finished.begin.time_since_epoch()).count()));
  return std::chrono::duration<double, std::milli>(done - begin).count();
}

/// Compares `job` with the peers' jobs called `name`. `restarts`: true if the jobs are started again after a failure.
void measure_jobs(Row& row, const Options& options, const Measurement& measurement, const Command& job,
                  const std::string& name, bool restarts) {
  Program floor{"libtorch_load", on_ranks(options.ranks, {"job", "load"})};
  floor.command.environment.emplace_back("OMPI_MCA_pml", "ob1");
  std::vector<Program> programs{{ours, job}, std::move(floor), {twin, job}};
  row.notes = {
      "libtorch_load is the launch of a program that has loaded libtorch, to the end of MPI_Init, by MPI's transport "
      "that starts fastest (Open MPI: pml ob1)"};
  std::optional<Peers> peers;
  if (options.with_peers) {
    peers.emplace();
    const auto flags = restarts ? std::vector<std::string>{"--max-restarts", "3"} : std::vector<std::string>();
    if (auto torchrun = peers->torchrun("torchrun", options.ranks, {name}, flags)) {
      // Without this setting, a restart sometimes hangs.
      if (restarts) torchrun->command.environment.emplace_back("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
      programs.push_back(std::move(*torchrun));
    } else {
      row.notes.push_back(Peers::note_of_missing("torchrun", "torch", "torch"));
    }
    if (auto ray = peers->ray_train(name, options.ranks))
      programs.push_back(std::move(*ray));
    else
      row.notes.push_back(Peers::note_of_missing("ray_train", "ray", "'ray[train]' torch"));
  }
  auto measured = make_row(row.name, alternate(programs, measurement, since_begin));
  measured.notes = std::move(row.notes);
  row = std::move(measured);
}

void measure_first_step(Row& row, const Options& options, const Measurement& measurement) {
  measure_jobs(row, options, measurement, on_ranks(options.ranks, {"job", "first-step"}), "start", false);
}

void measure_kill_to_step(Row& row, const Options& options, const Measurement& measurement) {
  measure_jobs(row, options, measurement, supervised(options.ranks, {"job", "recovery"}), "recovery", true);
}

}  // namespace

Benchmark start() {
  return {.cases = {"first step"}, .time = whole_jobs_time, .measure_processes = measure_first_step};
}

Benchmark recovery() {
  return {.cases = {"kill to step"}, .time = whole_jobs_time, .measure_processes = measure_kill_to_step};
}

}  // namespace muster::bench
