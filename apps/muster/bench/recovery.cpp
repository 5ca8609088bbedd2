// muster bench recovery: the time from the SIGKILL of a rank to the end of the first step after it, for whole jobs.
#include "bench.hpp"
#include "peers.hpp"
#include "programs.hpp"

#include <chrono>

namespace muster::bench {
namespace {

using namespace std::chrono_literals;

/// The jobs report both times, by the clock that all processes of a machine share. If no rank is killed, the time
/// begins with the launch.
double since_kill(const Finished& finished, const nlohmann::ordered_json& result) {
  const std::chrono::nanoseconds done(result.at("done_ns").get<std::int64_t>());
  const std::chrono::nanoseconds begin(
      result.value("killed_ns", std::chrono::nanoseconds(finished.begin.time_since_epoch()).count()));
  return std::chrono::duration<double, std::milli>(done - begin).count();
}

Program job(const std::string& name, int ranks) {
  auto command = supervised(ranks, {"job", "recovery"});
  command.limit = 120s;
  return {name, std::move(command)};
}

void measure_kill_to_step(std::vector<Row>& rows, const Options& options) {
  Program floor{"libtorch_load", on_ranks(options.ranks, {"job", "load"})};
  floor.command.environment.emplace_back("OMPI_MCA_pml", "ob1");
  std::vector<Program> programs{job(ours, options.ranks), std::move(floor), job(twin, options.ranks)};
  std::vector<std::string> notes{
      "libtorch_load is the launch of a program that has loaded libtorch, to the end of MPI_Init, by MPI's transport "
      "that "
      "starts fastest (Open MPI: pml ob1)"};
  std::optional<Peers> peers;
  if (options.with_peers) {
    peers.emplace();
    if (auto torchrun = peers->torchrun("torchrun", options.ranks, {"recovery"}, {"--max-restarts", "3"})) {
      // Without this setting a restart hangs sometimes.
      torchrun->command.environment.emplace_back("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
      programs.push_back(std::move(*torchrun));
    } else {
      notes.push_back(Peers::missing("torchrun", "torch", "torch"));
    }
    if (auto ray = peers->ray_train("recovery", options.ranks))
      programs.push_back(std::move(*ray));
    else
      notes.push_back(Peers::missing("ray_train", "ray", "'ray[train]' torch"));
  }

  tool::ProgressLine line;
  auto row = make_row("kill to step", alternate(programs, options, since_kill, line, "recovery"));
  row.notes = std::move(notes);
  rows.push_back(std::move(row));
}

}  // namespace

Benchmark recovery() {
  return {.name = "recovery",
          .description = "SIGKILL of a rank to the end of the next step, whole jobs",
          .cases = {"kill to step"},
          .measure_processes = measure_kill_to_step};
}

}  // namespace muster::bench
