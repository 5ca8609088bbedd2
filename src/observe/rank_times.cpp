#include "observe/rank_times.hpp"

#include <algorithm>

namespace muster::detail::observe {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

Json summary_of(const std::vector<RankTimes>& of_ranks) {
  const auto summary = [&](double RankTimes::*part) {
    std::vector<double> values;
    for (const auto& times : of_ranks) values.push_back(std::max(times.*part, 0.0));
    const auto [min, max] = std::ranges::minmax_element(values);
    return Json{{"min", *min}, {"median", median(values)}, {"max", *max}, {"max_rank", max - values.begin()}};
  };
  return {{"compute", summary(&RankTimes::compute)},
          {"wait", summary(&RankTimes::wait)},
          {"data", summary(&RankTimes::data)},
          {"save", summary(&RankTimes::save)}};
}

Json summary_of(const std::vector<std::int64_t>& of_ranks) {
  const auto max = std::ranges::max_element(of_ranks);
  return {{"max", *max}, {"max_rank", max - of_ranks.begin()}};
}

}  // namespace muster::detail::observe
