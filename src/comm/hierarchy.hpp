// An all-reduce over several nodes: inside each node every owner reduces its slice, the owners of the same slice
// exchange it between the nodes, and each shares it inside its node. So every owner's link works, and what leaves a
// node is the least that can: 2 S (n - 1) / n bytes for S bytes on n nodes.
#pragma once

#include "node/communicator.hpp"

#include <cstddef>
#include <memory>

namespace muster::detail::comm {

class Channel;

/// Starts one over the nodes of the channel, in place. It has ended when the communicator of the channel's node has
/// finished the ticket.
node::Communicator::Ticket all_reduce_over_nodes(const std::shared_ptr<Channel>& channel, void* data, std::size_t count,
                                                 const node::Reduction& reduction);

/// Makes progress with all of them that are under way on the channel: of two ranks that wait for different ones, each
/// needs the other's part of both.
void advance_over_nodes(Channel& channel);

}  // namespace muster::detail::comm
