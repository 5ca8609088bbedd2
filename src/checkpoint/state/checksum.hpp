// The bytes of tensors, and checksums by which ranks find out whether they hold the same. They are never stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace muster::detail::checkpoint {

/// Row by row, in the CPU's memory: the tensor's own where it lies there like that, else a copy.
class Bytes {
 public:
  explicit Bytes(const at::Tensor& tensor) : tensor_(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()) {}

  std::string_view all() const { return {static_cast<const char*>(tensor_.const_data_ptr()), tensor_.nbytes()}; }
  std::span<const std::byte> part(std::uint64_t begin, std::uint64_t end) const {
    return std::as_bytes(std::span(all())).subspan(begin, end - begin);
  }
  /// The same values as a tensor.
  const at::Tensor& tensor() const noexcept { return tensor_; }

 private:
  at::Tensor tensor_;
};

/// CRC-64, continued from `before`.
std::uint64_t checksum(std::string_view bytes, std::uint64_t before = 0) noexcept;
std::uint64_t checksum(const at::Tensor& tensor);

/// mixed_sum() of each, with one small copy from each device for all that is there.
std::vector<std::uint64_t> checksums_on_devices(const std::vector<at::Tensor>& tensors);

/// What a device computes, and a number there: the sum modulo 2^64 of the tensor's words mixed with their places.
at::Tensor mixed_sum(const at::Tensor& tensor);

}  // namespace muster::detail::checkpoint
