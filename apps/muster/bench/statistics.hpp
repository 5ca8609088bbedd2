// The statistics of a comparison. All functions are pure.
#pragma once

#include <cstddef>
#include <vector>

namespace muster::bench {

/// Returns the median; for an even number of values, the mean of the middle two; NaN if there are none.
double median(std::vector<double> values);

struct Interval {
  double low = 0;
  double high = 0;
};

/// Returns the 95% bootstrap interval of the median. Resampling uses a fixed seed, so the result depends only on the
/// values.
Interval bootstrap_interval(const std::vector<double>& values);

/// Returns the order of `count` candidates in a round. Each round begins one candidate further, and after every `count`
/// rounds the direction changes. So each candidate is equally often in each position, and follows different ones.
std::vector<std::size_t> rotation(int round, std::size_t count);

}  // namespace muster::bench
