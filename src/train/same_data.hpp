// Whether ranks have the same data.
#pragma once

#include "data/sources/fingerprint.hpp"
#include "muster/communicator.hpp"

#include <map>
#include <string>

namespace muster::detail::train {

/// An Error, the same on all ranks, that names the dataset, what differs, and a rank and its host on each side. The
/// first `workers` ranks are compared, each by what it found itself. Collective over the world.
void require_same_data(const Communicator& world, int workers, const std::map<std::string, data::Fingerprint>& mine);

}  // namespace muster::detail::train
