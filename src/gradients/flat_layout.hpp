// The layout of parameters, one after the other, in buckets of flat memory. A bucket is averaged as a whole. Also
// chooses which parameters share a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace muster::detail::gradients {

struct FlatLayout {
  /// Where a parameter lies.
  struct Slice {
    std::size_t bucket = 0;
    std::size_t index_in_bucket = 0;  ///< index among the members of the bucket
    std::size_t first_element = 0;    ///< first element, counted in the bucket
    std::size_t element_count = 0;    ///< elements
  };
  struct Bucket {
    std::vector<std::size_t> members;  ///< parameters, in the order of memory
    std::size_t element_count = 0;     ///< elements
  };

  std::vector<Slice> slices;  ///< [parameters]
  std::vector<Bucket> buckets;

  FlatLayout() = default;
  /// `members`: the parameters of each bucket. Every parameter is in one bucket; a bucket has one type and device.
  FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members);
};

/// Returns the members of as few buckets as possible, in the order of parameters.
std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters);

/// Size and kind of a gradient, for assign_buckets().
struct GradientSize {
  std::size_t bytes = 0;
  int kind = 0;  ///< gradients of one kind have the same type and device, and may share a bucket
};

/// Fills buckets with gradients in `order`, the order in which backward() is expected to make them. A bucket holds one
/// kind. Its limit is `bytes`, for the first bucket of a kind `first_bytes`; a larger gradient has its own bucket.
/// Returns the buckets in the order in which they become ready, each as the indices of its gradients in the order of
/// `order`. Every index of `order` occurs once.
std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients,
                                                     std::span<const std::size_t> order, std::size_t first_bytes,
                                                     std::size_t bytes);

/// Returns a view of the bucket's elements from `first` on, in the parameter's shape. It has the parameter's order of
/// memory too if that has no gaps, so that copies run linearly.
at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& bucket, std::size_t first);

}  // namespace muster::detail::gradients
