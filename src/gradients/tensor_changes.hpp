// Detects changes of tensors by reading only a few of their elements: changes of parameters by an optimizer, which
// changes all elements, and changes of gradients by the program, such as clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::gradients {

/// A few elements of each parameter on the CPU, and one of each parameter on a GPU that has the device and type of the
/// first one there. Cheap to take: it does not wait for a GPU.
class ParameterSamples {
 public:
  explicit ParameterSamples(std::vector<at::Tensor> parameters);
  /// True if one of these elements has another value now.
  bool changed() const;

 private:
  std::vector<at::Tensor> parameters_;
  std::string host_;
  at::Tensor device_;
};

/// Identifies the contents of a gradient: by its address, torch's count of writes to it and, on the CPU, a hash of some
/// of its cache lines: of all lines up to 4 KB, of at least 64 lines above that, and of one line in every 4 KB of a
/// large gradient. torch does not count writes through .data() or a pointer, which only the hash detects: always if 8
/// consecutive KB are written, seldom if single elements are. A sparse gradient is identified by the tensor and torch's
/// count.
class GradientMark {
 public:
  /// `own_references`: how many references to its memory muster itself has.
  explicit GradientMark(const at::Tensor& gradient, std::size_t own_references = 0);
  bool operator==(const GradientMark& other) const;

 private:
  const void* data_;
  /// torch's count of writes; none if other tensors use the memory, too, since a write to any of them raises the same
  /// count.
  std::optional<std::uint32_t> version_;
  std::uint64_t hash_ = 0;
};

/// Returns a hash of `bytes` bytes of memory, computed 8 bytes at a time from `seed`. For comparisons between ranks.
std::uint64_t hash_of(const void* memory, std::size_t bytes, std::uint64_t seed = 0);

/// True if reading all elements of the parameter's gradient costs next to nothing.
inline bool is_cheap_to_read(const at::Tensor& parameter) { return parameter.numel() <= 4096 && parameter.is_cpu(); }

/// True if a gradient, dense or sparse, has an element other than zero.
bool any_nonzero(const at::Tensor& gradient);
/// True if all elements of a gradient, dense or sparse, are finite.
bool all_finite(const at::Tensor& gradient);

}  // namespace muster::detail::gradients
