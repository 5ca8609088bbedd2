// The bytes of tensors, and fingerprints of tensors. Ranks compare fingerprints to find out whether their tensors are
// the same. Fingerprints are never stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace muster::detail::state {

/// The bytes of a tensor, contiguous in CPU memory: the tensor's own memory if it is contiguous in CPU memory and no
/// conjugate or negative view, otherwise a copy.
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

/// Returns the CRC-64 of the bytes. `before`: the CRC-64 of the bytes that precede them.
std::uint64_t fingerprint(std::string_view bytes, std::uint64_t before = 0) noexcept;
std::uint64_t fingerprint(const at::Tensor& tensor);

/// Returns the mixed_sum() of each tensor. The results of each device come to the CPU in one small copy.
std::vector<std::uint64_t> fingerprints_on_devices(const std::vector<at::Tensor>& tensors);

/// Returns a fingerprint as a tensor on the tensor's device, where it is computed: the sum, modulo 2^64, of the
/// tensor's elements as integers, each of them mixed with its index.
at::Tensor mixed_sum(const at::Tensor& tensor);

}  // namespace muster::detail::state
