// Memory of parameters and state that a fused optimizer does not write to while it is saved.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::optim {

/// Memory in which tensors lie, and an unchanging copy of its bytes.
struct MemorySnapshot {
  const std::byte* live_data = nullptr;  ///< where this process's tensors lie
  std::size_t bytes = 0;
  std::shared_ptr<const std::byte> snapshot_data = {};  ///< the same bytes, which do not change
};

/// An optimizer's step that may have such memory.
class SnapshotSource {
 public:
  virtual ~SnapshotSource() = default;
  /// Returns the memory, which stays unchanged until the next call; nothing if it has none. The ranks of a node share
  /// it, so its contents are the same on all of them. Collective.
  virtual std::optional<MemorySnapshot> take_snapshot() = 0;
};

/// The living SnapshotSources of a session, in the order in which they were made.
using SnapshotSources = std::vector<SnapshotSource*>;

}  // namespace muster::detail::optim
