// The statistics of a comparison: pure functions of numbers.
#pragma once

#include <cstddef>
#include <vector>

namespace muster::bench {

/// The median; the mean of the middle two values if their number is even. NaN if there are none.
double median(std::vector<double> values);

struct Interval {
  double low = 0;
  double high = 0;
};

/// The 95% bootstrap interval of the median, by resampling with a fixed seed: the same values give the same interval.
Interval bootstrap_interval(const std::vector<double>& values);

/// The order of `count` candidates in a round. It starts one candidate further in each round, and is reversed every
/// other time, so that each candidate is equally often in every position and does not always follow the same one.
std::vector<std::size_t> rotation(int round, std::size_t count);

}  // namespace muster::bench
