// Compares the ranks' copies of a state at a save, and gathers the parts that are per-rank.
#pragma once

#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "state/stateful.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::state {

/// Replication by the entry's name. An entry that is not in the map has Replication::equal.
using EntryReplication = std::map<std::string, Replication>;

EntryReplication replication_of(const StateEntries& entries);

/// Returns a fingerprint of all names, shapes and types, of the set of per-rank entries, and of the JSON values of all
/// other entries. Not collective.
std::uint64_t structure_fingerprint(const StateDict& state, const EntryReplication& replication);
/// Returns the tensors that are not per-rank. Their ReplicaFingerprint should be the same on all ranks.
std::vector<at::Tensor> replicated_tensors(const StateDict& state, const EntryReplication& replication);

/// Finds the differences between ranks, after their fingerprints of structure or tensors differed. A difference in one
/// of the user's own entries, in the names of entries, or in the shape or type of a per-rank tensor is an Error
/// (ExitCode::user_error), the same on all ranks, that names entry and ranks. A difference in an averaged entry only
/// logs a warning. Returns the names of the averaged tensors that differ: rank 0's copy of them is to be stored.
/// Collective.
std::set<std::string> find_drift(const Communicator& communicator, const StateDict& state,
                                 const EntryReplication& replication);

/// Returns the names of the per-rank tensors.
std::set<std::string> per_rank_tensors(const StateDict& state, const EntryReplication& replication);

/// Returns, for each entry of `values` whose replication is known, true if it is per-rank.
std::map<std::string, bool> per_rank_entries(const Json& values, const EntryReplication& replication);

/// Returns the values on every rank, with each per-rank value as the list of all ranks' values. Collective if there are
/// per-rank values. Without a communicator, the list has only this rank's value.
Json gather_values(const Communicator* communicator, const StateDict& state, const EntryReplication& replication);

}  // namespace muster::detail::state
