// Merges the entries of checkpoints that the ranks of a program pass to a report, or to a run as its start.
#pragma once

#include "base/export.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"

#include <optional>

namespace muster::detail::checkpoint {

/// Returns on all ranks the entries of all ranks' checkpoints. Each rank passes its own checkpoint or none. If several
/// ranks have an entry, the lowest rank's is used, with a warning if they differ. If every rank made its checkpoint by
/// from_dict() and gave it the entry by per_rank(), the rows of all ranks are joined. Collective.
StateDict merge_entries(const Communicator& communicator, const std::optional<Checkpoint>& given);

/// Returns the root's tensors and values on every rank. On ranks other than the root, the tensors are on the CPU.
/// Collective.
MUSTER_INTERNAL_API StateDict broadcast(const Communicator& communicator, const StateDict& mine, int root = 0);

}  // namespace muster::detail::checkpoint
