// The statistics of a comparison: numbers in, numbers out.
#pragma once

#include <cstddef>
#include <vector>

namespace muster::bench {

/// The mean of the two in the middle where their number is even. `values` is not empty.
double median(std::vector<double> values);

struct Interval {
  double low = 0;
  double high = 0;
};

/// The 95% bootstrap interval of the median, by resampling with a fixed seed: the same values give the same interval.
Interval bootstrap_interval(const std::vector<double>& values);

/// The order of `count` candidates in a round: begun one further in each round, and backwards every other time around,
/// so that each stands in every place equally often and does not always follow the same one.
std::vector<std::size_t> rotation(int round, std::size_t count);

}  // namespace muster::bench
