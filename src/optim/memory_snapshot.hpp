// Memory of parameters and state that a fused optimizer leaves unchanged while it is saved in the background.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::optim {

/// Memory in which tensors lie, and a copy of its bytes that does not change.
struct MemorySnapshot {
  const std::byte* live_data = nullptr;  ///< where this process's tensors lie
  std::size_t bytes = 0;
  std::shared_ptr<const std::byte> snapshot_data = {};  ///< the same bytes, which do not change
};

/// An optimizer's step that may offer a snapshot of its parameters and state.
class SnapshotSource {
 public:
  virtual ~SnapshotSource() = default;
  /// Returns a snapshot, which stays unchanged until the next call; nothing if there is none. The ranks of a node share
  /// its memory, so all of them see the same contents. Collective.
  virtual std::optional<MemorySnapshot> take_snapshot() = 0;
};

/// The living SnapshotSources of a session, in the order in which they were constructed.
using SnapshotSources = std::vector<SnapshotSource*>;

}  // namespace muster::detail::optim
