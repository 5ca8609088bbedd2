// A trace of ranks on several hosts, whose steady clocks differ: all of them are on one clock in it. Each step has a
// barrier, which nobody can leave before the last rank has come.
//   trace --profile=FIRST:LAST
#include <muster/muster.hpp>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

constexpr double tolerance_us = 50;  // or what the trace says of its clocks, where the ranks share their cores

void train(muster::Session& session, const muster::Config&) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  for ([[maybe_unused]] const auto epoch : session.epochs(1))
    for (auto& batch : session.get_dataset_shard("train").iter_batches({.global_batch_size = 12})) {
      net->forward(batch["x"]).sum().backward();
      session.barrier();
    }
}

std::filesystem::path trace_in(const std::filesystem::path& run) {
  for (const auto& entry : std::filesystem::directory_iterator(run))
    if (entry.path().filename().string().starts_with("trace_")) return entry.path();
  throw std::runtime_error("there is no trace in " + run.string());
}

/// Checks the trace; throws if a rank has left a barrier before another one came.
void check(const std::filesystem::path& path, int ranks) {
  muster::Json file;
  std::ifstream(path) >> file;
  struct Barrier {
    double last_came = -1e300, first_left = 1e300;
    int ranks = 0;
  };
  std::map<int, std::pair<int, double>> open;  // by the event's id: rank and begin
  std::map<int, int> counts;                   // by rank
  std::map<int, Barrier> barriers;             // by number
  for (const auto& event : file.at("traceEvents")) {
    if (event.at("name") != "barrier") continue;
    const int id = event.at("id"), rank = event.at("pid");
    const double time = event.at("ts");
    if (event.at("ph") == "b") open[id] = {rank, time};
    if (event.at("ph") != "e") continue;
    auto& barrier = barriers[counts[rank]++];
    barrier.last_came = std::max(barrier.last_came, open.at(id).second);
    barrier.first_left = std::min(barrier.first_left, time);
    ++barrier.ranks;
  }
  double worst = -1e300;
  for (const auto& [number, barrier] : barriers) {
    if (barrier.ranks != ranks) throw std::runtime_error("a barrier of the trace does not have all ranks");
    worst = std::max(worst, barrier.last_came - barrier.first_left);
  }
  const auto error_us = 1000 * file.at("otherData").at("clock_error_ms").get<double>();
  std::printf(
      "%zu barriers; at worst a rank leaves %.1f us before the last one comes; the clocks may be wrong by %.1f us\n",
      barriers.size(), worst, error_us);
  if (barriers.size() < 10 || worst > std::max(tolerance_us, 2 * error_us))
    throw std::runtime_error("the clocks do not agree");
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const char* const shared = std::getenv("MUSTER_HOSTS");
    const std::filesystem::path storage = launch.communicator().broadcast(shared == nullptr ? "." : shared);
    muster::TorchTrainerOptions options;
    options.run_config = {.name = "traced", .storage_path = storage};
    options.datasets = {{"train", muster::Dataset::from_tensors({{"x", at::ones({400, 1})}})}};
    auto result = muster::TorchTrainer(launch, train, options).fit();
    if (launch.rank() == 0 && !result.error) {
      check(trace_in(result.path), launch.size());
      std::filesystem::remove_all(result.path);
    }
    return result;
  });
}
