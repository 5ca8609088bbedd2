// The clocks of a run's nodes. The steady clock of a node counts from its start, so that those of two nodes differ.
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <vector>

namespace muster::detail::comm {

/// What must be added to the steady clock of a node to get that of rank 0's node, at the moment of the measurement.
struct ClockOffset {
  std::chrono::nanoseconds offset{0};
  std::chrono::nanoseconds error{0};                ///< the offset is wrong by at most this
  std::chrono::steady_clock::time_point when = {};  ///< by the clock of rank 0's node
};

/// Returns the offsets of all nodes on rank 0, and nothing on other ranks. Rank 0 sends a message to the first rank of
/// each node and gets its time back, several times; of these, the quickest counts. Collective.
std::vector<ClockOffset> measure_clock_offsets(const Communicator& communicator);

}  // namespace muster::detail::comm
