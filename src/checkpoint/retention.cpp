#include "checkpoint/retention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace muster::detail::checkpoint {

std::vector<int> surplus(std::vector<Scored> checkpoints, const CheckpointConfig& config) {
  const auto keep = static_cast<std::size_t>(config.num_to_keep.value_or(std::numeric_limits<int>::max()));
  if (checkpoints.size() <= keep) return {};
  const int newest = std::ranges::max(checkpoints, {}, &Scored::index).index;
  const double sign = config.checkpoint_score_order == ScoreOrder::max ? 1 : -1;
  std::ranges::sort(checkpoints, std::greater{}, [&](const Scored& checkpoint) {
    const double score = checkpoint.score.value_or(std::numeric_limits<double>::quiet_NaN());
    const bool counts = !config.checkpoint_score_attribute.empty() && !std::isnan(score);
    return std::tuple(counts, counts ? sign * score : 0, !checkpoint.rolled_back, checkpoint.index);
  });
  std::vector<int> gone;
  for (auto at = checkpoints.begin() + static_cast<std::ptrdiff_t>(keep); at != checkpoints.end(); ++at)
    if (at->index != newest) gone.push_back(at->index);
  std::ranges::sort(gone);
  return gone;
}

std::optional<double> score_of(const Json& metrics, const std::string& attribute) {
  if (!metrics.contains(attribute) || !metrics.at(attribute).is_number()) return {};
  return metrics.at(attribute).get<double>();
}

}  // namespace muster::detail::checkpoint
