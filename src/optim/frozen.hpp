// Parameters and state that a fused optimizer leaves as they are while they are saved.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::optim {

/// Memory of tensors as this process sees it, and the same bytes where they stay.
struct FrozenMemory {
  const std::byte* seen = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const std::byte> kept = {};
};

/// An optimizer's step that may have such memory.
class Freezable {
 public:
  virtual ~Freezable() = default;
  /// None where it has none. The ranks of a node have one memory in common, so what is in it is the same on all of
  /// them. It stays until the next call. Collective.
  virtual std::optional<FrozenMemory> freeze() = 0;
};

/// Those of a session that are alive, in the order in which they were made.
using Freezables = std::vector<Freezable*>;

}  // namespace muster::detail::optim
