// Checksums by which ranks find out whether they hold the same bits. They are compared, never stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace muster::detail::checkpoint {

/// XXH3, 64 bits.
std::uint64_t checksum(std::string_view bytes) noexcept;
std::uint64_t checksum(const at::Tensor& tensor);

/// A checksum of each tensor, taken where it lies: of one on the CPU by XXH3, of one on a device by that device, with
/// one small copy for all of them. The two kinds do not compare.
std::vector<std::uint64_t> checksums_in_place(const std::vector<at::Tensor>& tensors);

/// What a device computes: the sum, modulo 2^64, of the tensor's words mixed with their places. A number on the
/// tensor's device.
at::Tensor mixed_sum(const at::Tensor& tensor);

}  // namespace muster::detail::checkpoint
