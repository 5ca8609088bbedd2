// The layout of parameters in buckets, which are flat memory: parameters lie one after the other, and a bucket is
// averaged as a whole. Also chooses which parameters share a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <vector>

namespace muster::detail::gradients {

struct FlatLayout {
  /// The position of a parameter in its bucket.
  struct Slice {
    std::size_t bucket = 0;
    std::size_t index_in_bucket = 0;  ///< index in Bucket::members
    std::size_t first_element = 0;    ///< position of the first element in the bucket
    std::size_t element_count = 0;
  };
  struct Bucket {
    std::vector<std::size_t> members;  ///< indices of parameters, in the order in which they lie in memory
    std::size_t element_count = 0;
  };

  std::vector<Slice> slices;  ///< [parameters]
  std::vector<Bucket> buckets;

  FlatLayout() = default;
  /// `members`: the parameters of each bucket. Every parameter is in one bucket; a bucket has one type and device.
  FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members);
};

/// Puts all parameters of one type and device into one bucket. Returns the members of each bucket, in the order of
/// `parameters`.
std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters);

/// Size and kind of a gradient; an argument of assign_buckets().
struct GradientSize {
  std::size_t bytes = 0;
  int kind = 0;  ///< gradients of one kind have the same type and device, and may share a bucket
};

/// Distributes gradients to buckets, in `order`: the order in which backward() is expected to make them. A bucket holds
/// gradients of one kind, up to `first_bytes` in the first bucket of a kind and `bytes` in the others; a larger
/// gradient has a bucket of its own. Returns the buckets in the order in which backward() completes them. Each bucket
/// lists the indices of its gradients, sorted as in `order`. `order` holds each index at most once.
std::vector<std::vector<std::size_t>> assign_buckets(std::span<const GradientSize> gradients,
                                                     std::span<const std::size_t> order, std::size_t first_bytes,
                                                     std::size_t bytes);

/// Returns a view of the bucket's elements from `first` on, in the parameter's shape. The view also has the parameter's
/// strides if the parameter's memory has no gaps, so that copies run linearly.
at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& bucket, std::size_t first);

}  // namespace muster::detail::gradients
