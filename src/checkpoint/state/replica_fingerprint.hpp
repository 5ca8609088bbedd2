// A number over tensors that the ranks should have alike, found while something else is waited for.
#pragma once

#include "checkpoint/state/checksum.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::checkpoint {

class ReplicaFingerprint {
 public:
  /// Of these, in their order, each of which is read once.
  explicit ReplicaFingerprint(const std::vector<at::Tensor>& tensors);

  /// Looks at a little more; false if there is no more.
  bool advance();
  /// After the rest has been looked at.
  std::uint64_t value();

 private:
  std::vector<at::Tensor> here_, on_devices_;
  std::size_t next_ = 0;  // of those here
  std::optional<Bytes> current_;
  std::size_t done_ = 0;  // bytes of the current one
  std::vector<std::uint64_t> sums_;
};

}  // namespace muster::detail::checkpoint
