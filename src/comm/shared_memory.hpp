// Memory that the ranks of a node share: what gradients and optimizers take, and what users ask for.
#pragma once

#include "muster/communicator.hpp"
#include "node/communicator.hpp"
#include "node/shared_segment.hpp"

#include <cstddef>
#include <memory>
#include <optional>

namespace muster::detail::comm {

/// Memory of each rank that all ranks of its node map. It lives as long as a copy of this does; what is registered
/// lives as long as the channel.
struct SharedRegion {
  std::shared_ptr<node::SharedSegment> segment;
  node::Region region;
  int local_rank = 0;

  /// This rank's part.
  std::byte* data() const noexcept { return region.of(local_rank); }
  /// Takes memory for a piece of this rank's part, so that no access to it can fail. Local; an Error (ExitCode::retry)
  /// if there is not enough.
  void reserve(std::size_t first, std::size_t bytes) const {
    segment->reserve(static_cast<std::size_t>(data() - region.base) + first, bytes);
  }
};

/// `bytes` of address space for each rank, the same on all, of which `reserved` bytes are taken at once. None where
/// memory cannot be shared or any rank has no room; the memory's name is gone already. Collective.
std::optional<SharedRegion> share(const Communicator& communicator, std::size_t bytes, std::size_t reserved);

/// Memory of this rank alone: zeroes, aligned to a page.
std::shared_ptr<std::byte> own_memory(std::size_t bytes);

/// That of Communicator::shared_memory(). Where memory cannot be shared it is the rank's own. Collective.
std::shared_ptr<std::byte> shared_memory(const Communicator& communicator, std::size_t bytes);

/// Whether a reduction of that memory that is left before its end may write there later.
bool reaches_beyond_this_call(const Communicator& communicator, const void* data, std::size_t bytes);

}  // namespace muster::detail::comm
