// Histograms with TensorBoard's buckets: on both sides of 0, limits begin at 1e-12, and each is 1.1 times the last.
#pragma once

#include <span>
#include <vector>

namespace muster::detail::tensorboard {

struct Histogram {
  double min = 0, max = 0;
  double count = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> limits = {};  ///< upper limits of the buckets, in ascending order
  std::vector<double> counts = {};  ///< number of values in each bucket
};

/// Counts the values in each bucket. Ignores values that are not finite.
Histogram histogram_of(std::span<const float> values);

}  // namespace muster::detail::tensorboard
