// Communicators over some ranks, made by these ranks alone.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <vector>

namespace muster::detail::comm {

/// Returns a new communicator of `ranks`, which are numbers in `over`, in that order; a rank that has made one before
/// with the same ranks reuses it if all of them have dropped it. It belongs to the world of `over`. An Error
/// (ExitCode::usage) if this rank is not among the ranks, or one is named twice or does not exist. Collective over
/// `ranks`, not over `over`: two ranks make the subsets that they share in the same order.
MUSTER_INTERNAL_API Communicator make_subset(const Communicator& over, const std::vector<int>& ranks);

}  // namespace muster::detail::comm
