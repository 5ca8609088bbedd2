#include "statistics.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace muster::bench {

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

Interval bootstrap_interval(const std::vector<double>& values) {
  constexpr std::size_t resamples = 2000;
  std::mt19937_64 random(1);
  std::vector<double> medians(resamples), sample(values.size());
  for (auto& value : medians) {
    for (auto& drawn : sample) drawn = values[random() % values.size()];
    value = median(sample);
  }
  std::sort(medians.begin(), medians.end());
  return {medians[resamples / 40], medians[resamples - 1 - resamples / 40]};
}

std::vector<std::size_t> rotation(int round, std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto turn = static_cast<std::size_t>(round);
  std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(turn % count), order.end());
  if (turn / count % 2 == 1) std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace muster::bench
