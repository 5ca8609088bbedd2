// Whether tensors have changed, from a few of their elements: parameters, which a step of an optimizer changes all
// over, and gradients, as clipping does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::gradients {

/// Cheap to take: it waits for no GPU.
class Fingerprint {
 public:
  explicit Fingerprint(std::vector<at::Tensor> parameters);
  /// Whether one of the elements is another now.
  bool changed() const;

 private:
  std::vector<at::Tensor> parameters_;
  std::string host_;
  at::Tensor device_;
};

/// What a gradient on the CPU was at a time: where it lies, how often torch has written to it, and the values of some
/// of its cache lines: all of them up to 4 KB, at least 64 above that, and one of every 4 KB of a large gradient. torch
/// does not count writes through .data() or a pointer, which only these lines show: writing 8 KB in a row is always
/// seen, writing single elements seldom.
class GradientMark {
 public:
  explicit GradientMark(const at::Tensor& gradient);
  bool operator==(const GradientMark& other) const;

 private:
  const void* data_;
  /// Writes; none where others have the memory, too: views share a count, which a write through any of them raises.
  std::optional<std::uint32_t> version_;
  std::uint64_t hash_ = 0;
};

/// A hash of `bytes` of memory that goes on from `seed`: 8 bytes at a time, for comparisons between ranks.
std::uint64_t hash_of(const void* memory, std::size_t bytes, std::uint64_t seed = 0);

/// Whether a gradient, dense or sparse, is not zero everywhere.
bool any_nonzero(const at::Tensor& gradient);
/// Whether it is finite everywhere.
bool all_finite(const at::Tensor& gradient);

}  // namespace muster::detail::gradients
