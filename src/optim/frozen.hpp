// Memory of parameters and state that a fused optimizer does not write to while it is saved.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::optim {

/// Memory in which tensors lie, and an unchanging copy of its bytes.
struct FrozenMemory {
  const std::byte* seen = nullptr;  ///< where this process's tensors lie
  std::size_t bytes = 0;
  std::shared_ptr<const std::byte> kept = {};  ///< the same bytes, which do not change
};

/// An optimizer's step that may have such memory.
class Freezable {
 public:
  virtual ~Freezable() = default;
  /// Returns the memory, which stays unchanged until the next call; nothing if it has none. The ranks of a node share
  /// it, so its contents are the same on all of them. Collective.
  virtual std::optional<FrozenMemory> freeze() = 0;
};

/// The living Freezables of a session, in the order in which they were made.
using Freezables = std::vector<Freezable*>;

}  // namespace muster::detail::optim
