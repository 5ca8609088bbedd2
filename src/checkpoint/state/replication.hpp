// The ranks' copies of a state at a save: what all have alike is compared, what each has of its own is put together.
#pragma once

#include "checkpoint/state/stateful.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace muster::detail::checkpoint {

/// By the entry's name; one that is not here is the user's own: Replication::equal.
using EntryReplication = std::map<std::string, Replication>;

EntryReplication replication_of(const StateEntries& entries);

/// A number over all that the ranks should have alike, and of the rest names, shapes and types. Local.
std::uint64_t fingerprint(const StateDict& state, const EntryReplication& replication);

/// To be called when fingerprints differ: finds out where. A difference in what is the user's own is an Error
/// (ExitCode::user_error), the same on all ranks, that names entry and ranks; one in what is averaged is a warning.
/// Gives the tensors of which rank 0's copy is to be stored whole. Collective.
std::set<std::string> find_drift(const Communicator& communicator, const StateDict& state,
                                 const EntryReplication& replication);

/// The state with what each rank has of its own as one: tensors as [world, …], values as a list. Collective, and on
/// every rank; one rank alone where there is no communicator.
StateDict gather_per_rank(const Communicator* communicator, StateDict state, const EntryReplication& replication);

}  // namespace muster::detail::checkpoint
