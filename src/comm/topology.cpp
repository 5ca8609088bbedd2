#include "comm/topology.hpp"

#include <map>
#include <utility>

namespace muster::detail::comm {

Topology make_topology(const std::vector<int>& nodes, std::vector<std::string> hosts, int rank) {
  Topology topology{
      .local_rank = 0, .local_size = 0, .node_rank = 0, .num_nodes = 0, .node_of_rank = {}, .hosts = std::move(hosts)};
  std::map<int, int> number;
  for (const int node : nodes)
    topology.node_of_rank.push_back(number.try_emplace(node, static_cast<int>(number.size())).first->second);
  topology.num_nodes = static_cast<int>(number.size());
  topology.node_rank = topology.node_of_rank[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < nodes.size(); ++r) {
    if (topology.node_of_rank[r] != topology.node_rank) continue;
    ++topology.local_size;
    if (static_cast<int>(r) < rank) ++topology.local_rank;
  }
  return topology;
}

}  // namespace muster::detail::comm
