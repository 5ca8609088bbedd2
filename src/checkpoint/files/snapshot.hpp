// A snapshot of the state: a copy of the bytes that this rank writes, so that training may change the state meanwhile.
#pragma once

#include "checkpoint/files/state_file.hpp"
#include "optim/memory_snapshot.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::checkpoint {

/// Takes snapshots. Owns their memory, which the next snapshot uses again.
class Snapshot {
 public:
  /// The result of one snapshot.
  struct Result {
    Tensors tensors;                ///< valid until the next snapshot; only their bytes in `pieces` may be read
    std::uint64_t fingerprint = 0;  ///< with `compare`: of replicated tensors outside of `memory_snapshots`
  };

  /// Copies the bytes of `pieces`, the pieces of the file that this rank writes, past the processor's caches and on at
  /// most as many threads as torch has. Does not copy tensors in `memory_snapshots`, nor the rows of per-rank tensors
  /// that gather_rows() has copied. With `compare`, also computes one fingerprint of the replicated tensors that are
  /// not in `memory_snapshots`.
  Result take(const Layout& layout, const Tensors& tensors, const std::vector<std::uint64_t>& pieces,
              std::span<const optim::MemorySnapshot> memory_snapshots, bool compare);

 private:
  std::shared_ptr<std::byte> memory_;  ///< has the layout of the file; pages that were never written to take no memory
  std::uint64_t bytes_ = 0;
  std::vector<std::uint64_t> pieces_;
};

}  // namespace muster::detail::checkpoint
