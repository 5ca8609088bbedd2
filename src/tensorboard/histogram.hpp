// Histograms with TensorBoard's buckets: their limits grow by a tenth, from 1e-12 on, to both sides of 0.
#pragma once

#include <span>
#include <vector>

namespace muster::detail::tensorboard {

struct Histogram {
  double min = 0, max = 0;
  double count = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> limits = {};  ///< upper limits of the buckets, rising
  std::vector<double> counts = {};  ///< as many
};

/// Values that are not finite are left out.
Histogram histogram_of(std::span<const float> values);

}  // namespace muster::detail::tensorboard
