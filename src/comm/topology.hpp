// Who is where, as a pure function.
#pragma once

#include "muster/communicator.hpp"

#include <string>
#include <vector>

namespace muster::detail::comm {

/// `nodes[r]` is any number that stands for the node of rank r (equal where ranks share memory), `hosts[r]` its name.
Topology make_topology(const std::vector<int>& nodes, std::vector<std::string> hosts, int rank);

}  // namespace muster::detail::comm
