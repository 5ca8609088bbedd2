// topology NODES RANKS_PER_NODE [HOST_NAMES]: that the ranks know which of them share a node, and reach each other
// across nodes.
#include "muster/launch.hpp"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  int nodes = 0;
  int ranks_per_node = 0;
  int host_names = 0;  // as many as nodes
  launch.app().add_option("nodes", nodes)->required();
  launch.app().add_option("ranks_per_node", ranks_per_node)->required();
  launch.app().add_option("host_names", host_names);
  return launch.run([&] {
    const auto& world = launch.communicator();
    const auto& topology = world.topology();
    const std::set<std::string> hosts(topology.hosts.begin(), topology.hosts.end());
    const bool known = world.size() == nodes * ranks_per_node && topology.num_nodes == nodes &&
                       topology.local_size == ranks_per_node &&
                       static_cast<int>(hosts.size()) == (host_names == 0 ? nodes : host_names);

    // Long enough not to take the path of short messages.
    std::vector<double> numbers(1 << 18, world.rank() + 1.0);
    world.all_reduce(numbers);
    const double sum = world.size() * (world.size() + 1) / 2.0;
    const bool reached = numbers.front() == sum && numbers.back() == sum;

    if (world.rank() == 0 || !known || !reached)
      std::printf("rank %d of %d: node %d of %d, local rank %d of %d, %zu host names, sum %g\n", world.rank(),
                  world.size(), topology.node_rank, topology.num_nodes, topology.local_rank, topology.local_size,
                  hosts.size(), numbers.front());
    return world.all_reduce(std::int64_t{!known || !reached}) == 0 ? 0 : 1;
  });
}
