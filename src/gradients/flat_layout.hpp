// Parameters one behind the other in buckets of flat memory: what is averaged as a whole, whoever averages it, and
// which go together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace muster::detail::gradients {

struct FlatLayout {
  /// Where a parameter lies.
  struct Range {
    std::size_t bucket = 0;
    std::size_t number = 0;  ///< among the members of the bucket
    std::size_t first = 0;   ///< element of the bucket
    std::size_t count = 0;   ///< elements
  };
  struct Bucket {
    std::vector<std::size_t> members;  ///< parameters, in the order in which they lie
    std::size_t count = 0;             ///< elements
  };

  std::vector<Range> ranges;  ///< [parameters]
  std::vector<Bucket> buckets;

  FlatLayout() = default;
  /// `members`: the parameters of each bucket. Every one is in one bucket, with others of its type and device.
  FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members);
};

/// The members of as few buckets as possible, in the order of parameters.
std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters);

/// What the assignment asks of one gradient.
struct GradientSize {
  std::size_t bytes = 0;
  int kind = 0;  ///< gradients of one kind may lie in one tensor: same type, same device
};

/// Fills buckets with gradients in `order`, in which backward() is expected to make them. A bucket holds one kind and
/// is full at `bytes`, the first of a kind at `first_bytes`; a gradient larger than that has a bucket to itself. The
/// result lists buckets in the order in which they become ready, each the indices of its gradients in the order in
/// which they are made. Every index of `order` occurs once.
std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients,
                                                     std::span<const std::size_t> order, std::size_t first_bytes,
                                                     std::size_t bytes);

/// The elements of a bucket from `first` on, in the parameter's shape, and in its order of memory where that has no
/// gaps, so that copies run straight through.
at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& bucket, std::size_t first);

}  // namespace muster::detail::gradients
