// Communicators over some ranks, made by these ranks alone.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <vector>

namespace muster::detail::comm {

/// Returns a communicator of `ranks`, which are ranks of `over`, in that order. It belongs to the world of `over`, and
/// may reuse what an earlier one of the same ranks has left in the pool. Throws an Error (ExitCode::usage) if this rank
/// is not among them, or one is named twice or does not exist. Collective over `ranks`, not over `over`: two ranks must
/// make the subsets that they share in the same order.
MUSTER_INTERNAL_API Communicator make_subset(const Communicator& over, const std::vector<int>& ranks);

}  // namespace muster::detail::comm
