// Memory that the ranks of a node share, for gradients, optimizers, and users (Communicator::shared_memory()).
#pragma once

#include "muster/communicator.hpp"
#include "node/communicator.hpp"
#include "node/shared_segment.hpp"

#include <cstddef>
#include <memory>
#include <optional>

namespace muster::detail::comm {

/// A part of shared memory for each rank, which all ranks of its node map. It stays mapped while a copy of this value
/// exists. If the region is registered with the node's communicator, it stays mapped until a later call of
/// shared_memory() finds that no rank uses it any more, or until the channel ends.
struct SharedRegion {
  std::shared_ptr<node::SharedSegment> segment;  ///< null for memory of this rank alone
  node::Region region;
  int local_rank = 0;

  /// This rank's part.
  std::byte* data() const noexcept { return region.of(local_rank); }
  /// Reserves memory for `bytes` bytes from `first` in this rank's part, so that no access to them can fail. Throws an
  /// Error (ExitCode::retry) if there is not enough memory. Local.
  void reserve(std::size_t first, std::size_t bytes) const {
    if (segment) segment->reserve(static_cast<std::size_t>(data() - region.base) + first, bytes);
  }
};

/// Gives each rank `bytes` bytes of shared address space, the same number on all ranks, and reserves memory for the
/// first `reserved` bytes. Empty, on all ranks, if memory cannot be shared or there is not enough for some rank. The
/// segment's name is already removed. Collective.
std::optional<SharedRegion> allocate_shared(const Communicator& communicator, std::size_t bytes, std::size_t reserved);

/// Gives this rank private memory, as a region of one rank, for data that no other rank accesses. Memory is taken when
/// it is first written. Local.
SharedRegion own_region(std::size_t bytes);

/// Maps one segment of `bytes` zeroes on all ranks of each node, also where a rank is alone on its node, and reserves
/// memory for its first `reserved` bytes. Null on all ranks if there is a single rank or if memory cannot be shared;
/// `until_then`: see map_node_segment(). The segment's name is already removed. Collective.
std::shared_ptr<node::SharedSegment> map_segment(const Communicator& communicator, std::size_t bytes,
                                                 std::size_t reserved, const char* until_then);

/// Implements Communicator::shared_memory(). If memory cannot be shared, it is the rank's own. Collective.
std::shared_ptr<std::byte> shared_memory(const Communicator& communicator, std::size_t bytes);

/// True if a reduction of that memory may still write to it after its caller has stopped waiting.
bool may_be_written_later(const Communicator& communicator, const void* data, std::size_t bytes);

}  // namespace muster::detail::comm
