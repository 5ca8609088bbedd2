// muster bench start: the time from the launch of a job to the end of its first step.
#include "bench.hpp"
#include "peers.hpp"
#include "programs.hpp"

#include <chrono>

namespace muster::bench {
namespace {

using namespace std::chrono_literals;

/// The programs print the time of their first step's end, by the clock that all processes of a machine share.
double since_launch(const Finished& finished, const nlohmann::ordered_json& result) {
  const std::chrono::nanoseconds done(result.at("done_ns").get<std::int64_t>());
  return std::chrono::duration<double, std::milli>(done - finished.begin.time_since_epoch()).count();
}

Program job(const std::string& name, int ranks, const std::string& which) {
  auto command = on_ranks(ranks, {"job", which});
  command.limit = 120s;
  return {name, std::move(command)};
}

void measure_first_step(std::vector<Row>& rows, const Options& options) {
  auto floor = job("libtorch_load", options.ranks, "load");
  floor.command.environment.emplace_back("OMPI_MCA_pml", "ob1");
  std::vector<Program> programs{job(ours, options.ranks, "first-step"), std::move(floor),
                                job(twin, options.ranks, "first-step")};
  std::vector<std::string> notes{
      "libtorch_load is MPI_Init in a program that has loaded libtorch, by MPI's transport that starts "
      "fastest (Open MPI: pml ob1)"};
  std::optional<Peers> peers;
  if (options.with_peers) {
    peers.emplace();
    if (auto torchrun = peers->torchrun("torchrun", options.ranks, {"start"}))
      programs.push_back(std::move(*torchrun));
    else
      notes.push_back(Peers::missing("torchrun", "torch", "torch"));
    if (auto ray = peers->ray_train("start", options.ranks))
      programs.push_back(std::move(*ray));
    else
      notes.push_back(Peers::missing("ray_train", "ray", "'ray[train]' torch"));
  }

  tool::ProgressLine line;
  auto row = make_row("first step", alternate(programs, options, since_launch, line, "start"));
  row.notes = std::move(notes);
  rows.push_back(std::move(row));
}

}  // namespace

Benchmark start() {
  return {.name = "start",
          .description = "Launch to the end of the first step, whole jobs",
          .cases = {"first step"},
          .measure_processes = measure_first_step};
}

}  // namespace muster::bench
