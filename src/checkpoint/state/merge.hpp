// The entries in checkpoints of the user's: given to a report, or as what a run starts from.
#pragma once

#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"

#include <optional>

namespace muster::detail::checkpoint {

/// The entries of the checkpoints that the ranks give, each its own or none, on all of them: of an entry that several
/// give the lowest rank's, with a warning if theirs differ. Collective.
StateDict merge_entries(const Communicator& communicator, const std::optional<Checkpoint>& given);

/// The root's tensors, on the CPU, and values on every rank. Collective.
StateDict broadcast(const Communicator& communicator, const StateDict& mine, int root = 0);

}  // namespace muster::detail::checkpoint
