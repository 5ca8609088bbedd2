// The ranks' copies of a state at a save: what all have alike is compared, what each has of its own is put together.
#pragma once

#include "checkpoint/state/stateful.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// By the entry's name; one that is not here is the user's own: Replication::equal.
using EntryReplication = std::map<std::string, Replication>;

EntryReplication replication_of(const StateEntries& entries);

/// A number over names, shapes and types, over the values that the ranks should have alike, and over which those are.
/// Local.
std::uint64_t outline(const StateDict& state, const EntryReplication& replication);
/// The tensors that the ranks should have alike: their ReplicaFingerprint is that of all ranks.
std::vector<at::Tensor> tensors_alike(const StateDict& state, const EntryReplication& replication);

/// To be called when either of those differs: finds out where. A difference in what is the user's own is an Error
/// (ExitCode::user_error), the same on all ranks, that names entry and ranks; one in what is averaged is a warning.
/// Gives the tensors of which rank 0's copy is to be stored whole. Collective.
std::set<std::string> find_drift(const Communicator& communicator, const StateDict& state,
                                 const EntryReplication& replication);

/// The tensors of which each rank has its own.
std::set<std::string> per_rank_tensors(const StateDict& state, const EntryReplication& replication);

/// The values with what each rank has of its own as a list, on every rank. Collective; of one rank alone where there is
/// no communicator.
Json gather_values(const Communicator* communicator, const StateDict& state, const EntryReplication& replication);

}  // namespace muster::detail::checkpoint
