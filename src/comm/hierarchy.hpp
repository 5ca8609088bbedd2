// All-reduce over several nodes. The ranks of a node use the node's shared memory, and each node has one or more
// leaders. A leader reduces one slice inside its node, the leaders of the same slice exchange it between the nodes, and
// each shares the result inside its node. So all leaders use the network at once, and unless slices are short, a node
// sends the least possible: 2 S (n - 1) / n bytes for S bytes on n nodes.
#pragma once

#include "comm/slice_exchange.hpp"
#include "muster/communicator.hpp"
#include "node/communicator.hpp"

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

namespace muster::detail::comm {

class Channel;
class HierarchicalAllReduce;

/// The nodes of a channel, as one rank sees them.
struct Hierarchy {
  std::vector<int> ranks;        ///< [local size]: ranks of this node, as ranks of the channel
  std::shared_ptr<void> memory;  ///< the memory of `communicator`
  std::unique_ptr<node::NodeCommunicator> communicator;
  int num_leaders = 1;     ///< leaders of each node, its first ranks: as many as the smallest node has ranks
  Leaders leaders;         ///< of this rank's slices, as ranks of the channel; empty if this rank is no leader
  unsigned exchanges = 0;  ///< exchanges between nodes that this rank has started so far
  /// Unfinished all-reduces, in the order in which they were started; every wait advances all of them.
  std::deque<std::shared_ptr<HierarchicalAllReduce>> over_nodes;
};

/// The leaders of this rank's slices; none if this rank leads no slice. Valid as long as the communicator lives.
const Leaders& leaders_of(const Communicator& communicator) noexcept;
/// How many leaders each node has.
int num_leaders(const Communicator& communicator) noexcept;

// Call the following two inside Channel::run_exclusively().

/// Starts an in-place all-reduce over the nodes of the channel. It has finished when the communicator of this node has
/// finished the returned ticket.
node::NodeCommunicator::Ticket all_reduce_over_nodes(Channel& channel, void* data, std::size_t count,
                                                     const node::Reduction& reduction);

/// Advances all unfinished all-reduces of the channel: if two ranks wait for different all-reduces, each of them needs
/// the other rank's part in both.
void advance_over_nodes(Channel& channel);

}  // namespace muster::detail::comm
