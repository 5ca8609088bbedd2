// Makes worlds: groups of ranks with an alarm and timeouts of their own.
#pragma once

#include "base/export.hpp"
#include "comm/placement.hpp"
#include "muster/communicator.hpp"

namespace muster::detail::comm {

/// Makes a world of the same ranks with the nodes of `placement`. Ranks on one node must really share memory. Ranks on
/// different nodes communicate by MPI, even if they could share memory. Collective.
Communicator make_world(const Communicator& ranks, Placement placement);

/// Makes a separate world of the same ranks with the same timeouts, for another thread of each rank or for work that
/// may fail alone: an alarm in one world does not reach the other. Collective.
MUSTER_INTERNAL_API Communicator make_separate_world(const Communicator& ranks);

}  // namespace muster::detail::comm
