// collectives NODES: that sums over several nodes are right on every rank, in memory of one's own and in shared memory,
// and that no more bytes leave a node than must: 2 S (n - 1) / n for S bytes on n nodes.
#include "muster/launch.hpp"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace {

/// Bytes that have left this host by its network interface.
double bytes_sent() {
  std::ifstream devices("/proc/self/net/dev");
  for (std::string line; std::getline(devices, line);) {
    const auto colon = line.find(':');
    if (colon == std::string::npos || line.find("eth0") == std::string::npos) continue;
    std::istringstream fields(line.substr(colon + 1));
    double value = 0;
    for (int field = 0; field < 9; ++field) fields >> value;
    return value;
  }
  return 0;
}

/// Small integers, so that sums are exact.
template <class T>
T value(std::size_t i, int rank) {
  return static_cast<T>(i % 7 + static_cast<std::size_t>(rank));
}

template <class T>
bool sums_are_right(const muster::Communicator& world, std::span<T> data) {
  for (int round = 0; round < 5; ++round) {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value<T>(i, world.rank());
    world.all_reduce(data);
    const int n = world.size();
    for (std::size_t i = 0; i < data.size(); ++i)
      if (data[i] != static_cast<T>(n) * value<T>(i, 0) + static_cast<T>(n * (n - 1) / 2)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  int nodes = 0;
  launch.app().add_option("nodes", nodes)->required();
  return launch.run([&] {
    const auto& world = launch.communicator();
    const auto& topology = world.topology();
    bool right = topology.num_nodes == nodes;
    for (const std::size_t count : {1, 15, 5'000, 100'003, 3'000'017}) {
      std::vector<float> floats(count);
      std::vector<double> doubles(count);
      std::vector<std::int64_t> integers(count);
      right = sums_are_right<float>(world, floats) && right;
      right = sums_are_right<double>(world, doubles) && right;
      right = sums_are_right<std::int64_t>(world, integers) && right;
      right = sums_are_right<float>(world, world.shared_memory(count * sizeof(float)).as<float>()) && right;
    }

    // TCP's own share, and what the ranks' control messages take, is a few per cent.
    constexpr double overhead = 1.08;
    const auto memory = world.shared_memory(std::size_t{32} << 20);
    world.barrier();
    const double before = bytes_sent();
    world.all_reduce(memory.as<float>());
    world.barrier();
    const double sent = bytes_sent() - before;
    const double bound = 2.0 * static_cast<double>(memory.size()) * (nodes - 1) / nodes;
    const bool lean = sent <= overhead * bound;

    if (topology.local_rank == 0)
      std::printf("node %d of %d: %.3f of the least that must leave it\n", topology.node_rank, nodes, sent / bound);
    if (!right) std::printf("rank %d: a sum is wrong\n", world.rank());
    return world.all_reduce(std::int64_t{!right || !lean}) == 0 ? 0 : 1;
  });
}
