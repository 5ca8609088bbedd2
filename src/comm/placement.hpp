// On which node each rank of a world is.
#pragma once

#include <string>
#include <vector>

namespace muster::detail::comm {

class MpiCommunicator;

/// The nodes of all ranks of a world. find_placement() finds them; tests make up their own.
struct Placement {
  std::vector<int> node_of_rank;   ///< [rank]: any number, equal where ranks share memory
  std::vector<std::string> hosts;  ///< [rank]: the name of its host
};

/// Finds the node of each rank, whether the ranks of this node have a core each (has_core_per_rank), and removes shared
/// memory that killed jobs have left on the node. Collective over `over`, whose ranks must all have come.
Placement find_placement(MpiCommunicator& over);

}  // namespace muster::detail::comm
