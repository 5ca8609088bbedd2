// The fingerprint of replicated tensors, computed in small steps while the caller waits for something else.
#pragma once

#include "state/fingerprint.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::state {

/// Computes one fingerprint of several tensors, block by block.
class ReplicaFingerprint {
 public:
  /// Each tensor is read once: those on the CPU by advance(), in the given order, those on devices by value().
  explicit ReplicaFingerprint(const std::vector<at::Tensor>& tensors);

  /// Reads the next block of the tensors on the CPU; returns false if there is none left.
  bool advance();
  /// Reads all remaining blocks and the tensors on devices, and returns the fingerprint.
  std::uint64_t value();

 private:
  std::vector<at::Tensor> on_cpu_, on_devices_;
  std::size_t next_ = 0;  // index into on_cpu_
  std::optional<Bytes> current_;
  std::size_t done_ = 0;                     // bytes of current_ that were read
  std::vector<std::uint64_t> fingerprints_;  // fingerprints of the tensors on the CPU; the last one may be unfinished
};

}  // namespace muster::detail::state
