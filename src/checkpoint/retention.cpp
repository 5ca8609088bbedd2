#include "checkpoint/retention.hpp"

#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/rollbacks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace muster::detail::checkpoint {

std::vector<int> surplus(std::vector<Scored> checkpoints, const CheckpointConfig& config) {
  const auto keep = static_cast<std::size_t>(config.num_to_keep.value_or(std::numeric_limits<int>::max()));
  if (checkpoints.size() <= keep) return {};
  const int newest = std::ranges::max(checkpoints, {}, [](const Scored& checkpoint) {
                       return std::pair(!checkpoint.rolled_back, checkpoint.index);
                     }).index;
  std::erase_if(checkpoints, [](const Scored& checkpoint) { return checkpoint.pinned; });
  if (checkpoints.size() <= keep) return {};
  const double sign = config.checkpoint_score_order == ScoreOrder::max ? 1 : -1;
  std::ranges::sort(checkpoints, std::greater{}, [&](const Scored& checkpoint) {
    const double score = checkpoint.score.value_or(std::numeric_limits<double>::quiet_NaN());
    const bool counts = !config.checkpoint_score_attribute.empty() && !std::isnan(score);
    return std::tuple(!checkpoint.rolled_back, counts, counts ? sign * score : 0, checkpoint.index);
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

void prune(const Tier& tier, const CheckpointConfig& config,
           const std::function<bool(std::int64_t training_iteration)>& needed) noexcept {
  if (!config.num_to_keep) return;
  try {
    const auto rollbacks = read_rollbacks(tier.folder());
    std::vector<Scored> checkpoints;
    for (const auto& [index, path] : tier.list().published) try {
        const auto metrics = measured(path, read_manifest(path).metrics);
        const bool given_up = rolled_back(rollbacks, index);
        const bool waits =
            status_in(metrics) == CheckpointStatus::pending_validation ||
            (needed && metrics.is_object() && needed(metrics.value("training_iteration", std::int64_t{0})));
        checkpoints.push_back(
            {index, score_of(metrics, config.checkpoint_score_attribute), given_up, !given_up && waits});
      } catch (const Error&) {
        // Damaged: it does not count, and whoever resumes next will look at it.
      }
    for (const int index : surplus(std::move(checkpoints), config)) tier.remove(index);
  } catch (const std::exception& error) {
    log::warn(std::string("removing old checkpoints: ") + error.what());
  }
}

}  // namespace muster::detail::checkpoint
