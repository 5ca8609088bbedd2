// Merges the entries of checkpoints that the user gives to a report, or to a run as its start.
#pragma once

#include "base/export.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"

#include <optional>

namespace muster::detail::checkpoint {

/// Returns on all ranks the entries of all ranks' checkpoints. Each rank gives its own checkpoint or none. If several
/// ranks give an entry, the lowest rank's is used, with a warning if they differ; of an entry that from_dict() has
/// taken through per_rank() on every rank, the rows of all ranks. Collective.
StateDict merge_entries(const Communicator& communicator, const std::optional<Checkpoint>& given);

/// Returns the root's tensors, on the CPU, and its values on every rank. Collective.
MUSTER_INTERNAL_API StateDict broadcast(const Communicator& communicator, const StateDict& mine, int root = 0);

}  // namespace muster::detail::checkpoint
