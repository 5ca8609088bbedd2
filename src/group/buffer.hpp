// The elements of a tensor as one contiguous piece of memory on the CPU, for the duration of an operation.
#pragma once

#include "comm/collectives.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string_view>

namespace muster::detail::group {

/// How an operation accesses a tensor.
enum class Access { read, write, update };

/// Returns the type of `comm/` for the elements; nothing if they can be moved but not reduced.
std::optional<comm::Dtype> dtype_of(at::ScalarType type) noexcept;

class Buffer {
 public:
  /// Uses the tensor's own memory if it is contiguous, on the CPU, and no conjugate or negative view; otherwise makes a
  /// copy on the CPU. Throws an Error that begins with `doing` if the tensor is undefined, sparse, quantised or nested,
  /// on a device other than CPU and GPU, or if it is written and its elements share memory.
  Buffer(const at::Tensor& tensor, Access access, std::string_view doing);

  std::size_t count() const { return static_cast<std::size_t>(memory_.numel()); }
  at::ScalarType scalar_type() const { return memory_.scalar_type(); }
  /// The elements in the tensor's order, contiguous, without gradient.
  const at::Tensor& memory() const noexcept { return memory_; }
  void* data() const;
  /// Returns a message to or from `rank`: `count` elements from `first` on; as bytes if `comm/` lacks their type.
  comm::Message message(int rank, std::size_t first, std::size_t count) const;
  comm::Message message(int rank) const { return message(rank, 0, count()); }
  /// The type in which message() counts elements.
  comm::Dtype wire_type() const noexcept { return dtype_of(scalar_type()).value_or(comm::Dtype::u8); }

  /// Multiplies the operation's input by `factor`; a tensor that is only read is not changed.
  void scale(const at::Scalar& factor);
  /// Makes finish() divide the sum by `ranks`, unless the tensor is only read. All ranks then send 16-bit floats as
  /// float, since a sum may be too large for 16 bits although its average is not.
  void average_over(int ranks);

  /// The last step of the operation: divides if average_over() was called, and copies memory() to the tensor if
  /// memory() is a copy.
  void finish();

 private:
  Access access_;
  at::Tensor memory_;
  at::Tensor target_;  // undefined if memory_ is the tensor's own, or is only read
  int divisor_ = 1;
};

}  // namespace muster::detail::group
