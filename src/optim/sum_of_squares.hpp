// The sum of squares from which the norm of gradients is computed; fused and other steps use the same.
#pragma once

#include <cstddef>

namespace muster::detail::optim {

/// Adds in double precision and in a fixed order: eight partial sums, which the processor computes in parallel.
template <class T>
double sum_of_squares(const T* values, std::size_t count) {
  double sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t k = 0; k < 8; ++k)
      sums[k] += static_cast<double>(values[i + k]) * static_cast<double>(values[i + k]);
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace muster::detail::optim
