// Memory that the ranks of a node share: the team of each channel, and what users ask for.
#pragma once

#include "muster/communicator.hpp"
#include "node/shared_segment.hpp"
#include "node/team.hpp"

#include <cstddef>
#include <memory>
#include <optional>

namespace muster::comm {

/// Gives the channel its node (see Channel::node) if its ranks can share memory; where they cannot, for want of room in
/// /dev/shm, a warning says so once, and MPI carries everything. Collective.
void attach_node(const Communicator& communicator);

/// A segment that all ranks of a node map, `bytes` for each of them: none if any rank of the communicator has no room.
/// Its name is gone already. Collective.
std::shared_ptr<node::SharedSegment> share(const Communicator& communicator, std::size_t bytes);

/// Communicator::shared_memory(). Where memory cannot be shared it is the rank's own. Collective.
SharedMemory shared_memory(const Communicator& communicator, std::size_t bytes);

/// The same as a region that the engine knows; none where memory cannot be shared. It lives as long as the channel;
/// the pages of this rank's part come when they are touched. Collective.
std::optional<node::Region> shared_region(const Communicator& communicator, std::size_t bytes_per_rank);

/// Whether a reduction of that memory that is left before its end may write there later.
bool reaches_beyond_this_call(const Communicator& communicator, const void* data, std::size_t bytes);

}  // namespace muster::comm
