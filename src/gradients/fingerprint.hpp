// Whether parameters have changed, from a few of their elements: what a step of an optimizer does to all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

namespace muster::detail::gradients {

/// Cheap to take: it waits for no GPU. Two of the same parameters differ if one of the elements does.
class Fingerprint {
 public:
  static constexpr std::size_t most_tensors = 8;
  /// Of the first so many.
  explicit Fingerprint(const std::vector<at::Tensor>& parameters);
  bool operator==(const Fingerprint& other) const;

 private:
  std::string host_;
  at::Tensor device_;
};

/// Whether a gradient, dense or sparse, is not zero everywhere.
bool any_nonzero(const at::Tensor& gradient);
/// Whether it is finite everywhere.
bool all_finite(const at::Tensor& gradient);

}  // namespace muster::detail::gradients
