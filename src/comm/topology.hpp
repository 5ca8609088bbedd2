// Who is where: what a world is made from, and what each of its communicators makes of it.
#pragma once

#include "muster/communicator.hpp"

#include <string>
#include <vector>

namespace muster::detail::comm {

/// The nodes of all ranks of a world. A launch's is the one that MPI finds; tests make one up.
struct Placement {
  std::vector<int> node_of_rank;   ///< [rank]: any number, equal where ranks share memory
  std::vector<std::string> hosts;  ///< [rank]: the name of its host
};

/// What rank `rank` of a communicator sees, whose ranks are those `ranks` of the placement. A pure function.
Topology make_topology(const Placement& placement, const std::vector<int>& ranks, int rank);

}  // namespace muster::detail::comm
