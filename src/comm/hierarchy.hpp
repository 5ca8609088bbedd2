// Nodes of ranks. Inside a node they go through its memory; an all-reduce over several nodes has leaders on each of
// them: a leader reduces its slice inside its node, the leaders of the same slice exchange it between the nodes, and
// each shares it inside its node. So every leader's link works, and what leaves a node is the least that can:
// 2 S (n - 1) / n bytes for S bytes on n nodes.
#pragma once

#include "node/communicator.hpp"

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

namespace muster::detail::comm {

class Channel;
class HierarchicalAllReduce;

/// A channel's, as a rank of one of its nodes has it.
struct Hierarchy {
  std::vector<int> ranks;        ///< of this node, [local size]: rank in the channel
  std::shared_ptr<void> memory;  ///< the communicator's
  std::unique_ptr<node::Communicator> communicator;
  int leaders = 1;                                ///< the first ranks of each node: as many as the least node has
  std::vector<std::vector<int>> leaders_of_node;  ///< [num_nodes][leaders]: rank in the channel
  unsigned exchanges = 0;                         ///< that there have been between this leader and its fellows
  /// Those under way, in the order in which they were started; every wait advances all of them.
  std::deque<std::shared_ptr<HierarchicalAllReduce>> over_nodes;
};

// Both inside Channel::drive().

/// Starts one over the nodes of the channel, in place. It has ended when the communicator of the channel's node has
/// finished the ticket.
node::Communicator::Ticket all_reduce_over_nodes(Channel& channel, void* data, std::size_t count,
                                                 const node::Reduction& reduction);

/// Makes progress with all of them that are under way on the channel: of two ranks that wait for different ones, each
/// needs the other's part of both.
void advance_over_nodes(Channel& channel);

}  // namespace muster::detail::comm
