// Sharing of decoded chunks among the ranks of a node.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <memory>
#include <span>

namespace muster::detail::data {

class Source;

/// Has the ranks of each node keep the decoded chunks of these datasets together, where Source::node_chunks() allows
/// it, the ranks of a node read the same files, and /dev/shm has room on every node (node::spare_shared_memory()).
/// Nothing changes for datasets that are shared already. A rank without data gives no sources; the others give the same
/// datasets in the same order. Opens the datasets. Collective.
MUSTER_INTERNAL_API void share_chunks(const Communicator& communicator,
                                      std::span<const std::shared_ptr<Source>> sources);

}  // namespace muster::detail::data
