// Checks that ranks have the same datasets.
#pragma once

#include "base/export.hpp"
#include "data/sources/fingerprint.hpp"
#include "muster/communicator.hpp"

#include <map>
#include <string>

namespace muster::detail::run {

/// Compares the fingerprints of the data on the first `workers` ranks. If they differ, throws an Error, the same on all
/// ranks, that names the dataset, the difference, and two differing ranks with their hosts. Collective over the world.
MUSTER_INTERNAL_API void require_same_data(const Communicator& world, int workers,
                                           const std::map<std::string, data::DatasetFingerprint>& mine);

}  // namespace muster::detail::run
