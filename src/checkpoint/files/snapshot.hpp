// A state as it was: what a rank is to write of it, copied so that training can go on.
#pragma once

#include "checkpoint/files/state_file.hpp"
#include "optim/frozen.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::checkpoint {

/// Holds the memory of the copies, so that the next snapshot finds it there.
class Snapshot {
 public:
  struct Taken {
    Tensors tensors;                ///< of which the bytes in those pieces may be read, until the next snapshot
    std::uint64_t fingerprint = 0;  ///< over all tensors that the ranks should have alike, but for frozen ones
  };

  /// Copies the bytes of these pieces of the file, past the processor's caches and on as many threads as torch has;
  /// what is frozen stays where it is. With `compare` it looks at all other bytes too, of the tensors that are no
  /// rank's own.
  Taken take(const Layout& layout, const Tensors& tensors, const std::vector<std::uint64_t>& pieces,
             std::span<const optim::FrozenMemory> frozen, bool compare);

 private:
  std::shared_ptr<std::byte> memory_;  ///< as the file; only what has been written to takes space
  std::uint64_t bytes_ = 0;
  std::vector<std::uint64_t> pieces_;
};

}  // namespace muster::detail::checkpoint
