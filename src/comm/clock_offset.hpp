// The clocks of a run's nodes. A node's steady clock counts from the node's start, so the clocks of two nodes differ.
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <vector>

namespace muster::detail::comm {

/// The difference between two steady clocks when it was measured: rank 0's node minus another node.
struct ClockOffset {
  std::chrono::nanoseconds offset{0};
  std::chrono::nanoseconds error{0};                ///< the largest possible error of `offset`
  std::chrono::steady_clock::time_point when = {};  ///< time of the measurement, by the clock of rank 0's node
};

/// Returns the offsets of all nodes on rank 0, and nothing on other ranks. Rank 0 asks the first rank of each other
/// node for its time, many times, and uses the answer that came most quickly. Collective.
std::vector<ClockOffset> measure_clock_offsets(const Communicator& communicator);

}  // namespace muster::detail::comm
