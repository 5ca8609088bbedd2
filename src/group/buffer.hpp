// The elements of a tensor in one contiguous piece, from the start of an operation to its end.
#pragma once

#include "comm/collectives.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string_view>

namespace muster::detail::group {

/// What an operation does with a tensor.
enum class Access { read, write, update };

/// The type in which a reduction sees the elements; none where they can be moved but not reduced.
std::optional<comm::Dtype> dtype_of(at::ScalarType type) noexcept;

class Buffer {
 public:
  /// Uses the tensor's own memory where it is contiguous and on the CPU, else a copy there. Throws an Error that begins
  /// with `doing` for tensors that have no such memory: sparse, quantised, nested, or on another device than a GPU.
  Buffer(const at::Tensor& tensor, Access access, std::string_view doing);

  std::size_t count() const { return static_cast<std::size_t>(memory_.numel()); }
  at::ScalarType scalar_type() const { return memory_.scalar_type(); }
  /// In the order of the tensor's elements, contiguous, without gradient.
  const at::Tensor& memory() const noexcept { return memory_; }
  void* data() const;
  /// The elements from `first` on, as bytes where the type is not one of comm's.
  comm::Message message(int rank, std::size_t first, std::size_t count) const;
  comm::Message message(int rank) const { return message(rank, 0, count()); }
  /// The type of the elements that message() counts.
  comm::Dtype wire_type() const noexcept { return dtype_of(scalar_type()).value_or(comm::Dtype::u8); }

  /// Multiplies what goes into the operation; a tensor that is only read stays as it is.
  void scale(const at::Scalar& factor);
  /// What comes out of the sum is to be divided by the number of ranks. Half types travel as float, on all ranks alike:
  /// a sum that is too large for them may have an average that is not.
  void average_over(int ranks);

  /// The last step of the operation: divides, and copies back to a tensor whose memory it is not.
  void finish();

 private:
  Access access_;
  at::Tensor memory_;
  at::Tensor target_;  // undefined where memory_ is the tensor's own, or is only read
  int divisor_ = 1;
};

}  // namespace muster::detail::group
