// Which gradients travel together: a pure function of their sizes.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace muster::detail::gradients {

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

}  // namespace muster::detail::gradients
