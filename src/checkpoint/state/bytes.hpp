// The bytes of a tensor as a checkpoint stores them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace muster::detail::checkpoint {

/// Row by row, in the CPU's memory: the tensor's own where it lies there like that, else a copy.
class Bytes {
 public:
  explicit Bytes(const at::Tensor& tensor) : tensor_(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()) {}

  std::span<const std::byte> all() const { return part(0, tensor_.nbytes()); }
  std::span<const std::byte> part(std::uint64_t begin, std::uint64_t end) const {
    return {static_cast<const std::byte*>(tensor_.const_data_ptr()) + begin, end - begin};
  }
  /// The same values as a tensor.
  const at::Tensor& tensor() const noexcept { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace muster::detail::checkpoint
