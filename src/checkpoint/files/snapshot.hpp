// A snapshot of the state: a copy of the parts that this rank writes, so that training can continue meanwhile.
#pragma once

#include "checkpoint/files/state_file.hpp"
#include "optim/memory_snapshot.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::checkpoint {

/// Owns the memory of the copies and uses it again for the next snapshot.
class Snapshot {
 public:
  /// What one snapshot has copied.
  struct Result {
    Tensors tensors;                ///< only their bytes in `pieces` may be read, until the next snapshot
    std::uint64_t fingerprint = 0;  ///< over all replicated tensors that are not in memory_snapshots
  };

  /// Copies the bytes of these pieces of the file, past the processor's caches, on as many threads as torch has.
  /// Tensors in `memory_snapshots` are not copied. With `compare` it also computes the fingerprint of all other
  /// replicated tensors.
  Result take(const Layout& layout, const Tensors& tensors, const std::vector<std::uint64_t>& pieces,
              std::span<const optim::MemorySnapshot> memory_snapshots, bool compare);

 private:
  std::shared_ptr<std::byte> memory_;  ///< laid out like the file; only pages that were written to take space
  std::uint64_t bytes_ = 0;
  std::vector<std::uint64_t> pieces_;
};

}  // namespace muster::detail::checkpoint
