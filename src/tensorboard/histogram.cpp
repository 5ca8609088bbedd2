#include "tensorboard/histogram.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace muster::detail::tensorboard {
namespace {

/// Returns the upper limits of all buckets. The outermost limits are the least and the largest double.
std::vector<double> make_limits() {
  std::vector<double> positive;
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) positive.push_back(limit);
  positive.push_back(std::numeric_limits<double>::max());
  std::vector<double> limits;
  for (auto at = positive.rbegin(); at != positive.rend(); ++at) limits.push_back(-*at);
  limits.push_back(0);
  limits.insert(limits.end(), positive.begin(), positive.end());
  return limits;
}

}  // namespace

Histogram histogram_of(std::span<const float> values) {
  static const auto limits = make_limits();
  Histogram histogram{.min = std::numeric_limits<double>::max(), .max = std::numeric_limits<double>::lowest()};
  std::vector<double> counts(limits.size());
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    // A bucket counts the values below its own limit that are not below the limit before.
    ++counts[static_cast<std::size_t>(std::ranges::upper_bound(limits, value) - limits.begin())];
    ++histogram.count;
    histogram.sum += value;
    histogram.sum_of_squares += value * value;
    histogram.min = std::min(histogram.min, value);
    histogram.max = std::max(histogram.max, value);
  }
  if (histogram.count == 0) return {.limits = {0}, .counts = {0}};
  // Buckets without values at both ends are left out, except for one at the beginning: its limit is the lower limit of
  // the first bucket with values.
  const auto has_some = [](double count) { return count > 0; };
  const auto first = std::ranges::find_if(counts, has_some) - counts.begin();
  const auto end = std::find_if(counts.rbegin(), counts.rend(), has_some).base() - counts.begin();
  const auto begin = std::max<std::ptrdiff_t>(first - 1, 0);
  histogram.limits.assign(limits.begin() + begin, limits.begin() + end);
  histogram.counts.assign(counts.begin() + begin, counts.begin() + end);
  return histogram;
}

}  // namespace muster::detail::tensorboard
