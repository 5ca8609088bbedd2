#include "comm/topology.hpp"

#include <map>
#include <utility>

namespace muster::detail::comm {

Topology make_topology(const Placement& placement, const std::vector<int>& ranks, int rank) {
  Topology topology;
  topology.local_size = 0;
  std::map<int, int> number;
  for (const int r : ranks) {
    const int node = placement.node_of_rank[static_cast<std::size_t>(r)];
    topology.node_of_rank.push_back(number.try_emplace(node, static_cast<int>(number.size())).first->second);
    topology.hosts.push_back(placement.hosts[static_cast<std::size_t>(r)]);
  }
  topology.num_nodes = static_cast<int>(number.size());
  topology.node_rank = topology.node_of_rank[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (topology.node_of_rank[r] != topology.node_rank) continue;
    ++topology.local_size;
    if (static_cast<int>(r) < rank) ++topology.local_rank;
  }
  return topology;
}

}  // namespace muster::detail::comm
