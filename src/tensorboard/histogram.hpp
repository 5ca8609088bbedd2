// Histograms with TensorBoard's buckets: on both sides of 0, limits grow from 1e-12 by factors of 1.1 up to 1e20.
#pragma once

#include <span>
#include <vector>

namespace muster::detail::tensorboard {

struct Histogram {
  double min = 0, max = 0;
  double count = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> limits = {};  ///< upper limits of the buckets (excluded), in ascending order
  std::vector<double> counts = {};  ///< number of values in each bucket
};

/// Counts the values in each bucket. Ignores values that are not finite; if all are, returns one empty bucket.
Histogram histogram_of(std::span<const float> values);

}  // namespace muster::detail::tensorboard
