#include "checkpoint/retention.hpp"

#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/rollbacks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <ranges>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace muster::detail::checkpoint {

std::vector<int> indices_to_prune(std::vector<ScoredCheckpoint> checkpoints, const CheckpointConfig& config) {
  const auto keep = static_cast<std::size_t>(config.num_to_keep.value_or(std::numeric_limits<int>::max()));
  if (checkpoints.size() <= keep) return {};
  const int newest = std::ranges::max(checkpoints, {}, [](const ScoredCheckpoint& checkpoint) {
                       return std::pair(!checkpoint.rolled_back, checkpoint.index);
                     }).index;
  std::erase_if(checkpoints, [](const ScoredCheckpoint& checkpoint) { return checkpoint.pinned; });
  if (checkpoints.size() <= keep) return {};
  const double sign = config.checkpoint_score_order == ScoreOrder::max ? 1 : -1;
  std::ranges::sort(checkpoints, std::greater{}, [&](const ScoredCheckpoint& checkpoint) {
    const double score = checkpoint.score.value_or(std::numeric_limits<double>::quiet_NaN());
    const bool has_score = !config.checkpoint_score_attribute.empty() && !std::isnan(score);
    return std::tuple(!checkpoint.rolled_back, has_score, has_score ? sign * score : 0, checkpoint.index);
  });
  std::vector<int> indices;
  for (auto at = checkpoints.begin() + static_cast<std::ptrdiff_t>(keep); at != checkpoints.end(); ++at)
    if (at->index != newest) indices.push_back(at->index);
  std::ranges::sort(indices);
  return indices;
}

std::optional<double> score_of(const Json& metrics, const std::string& attribute) {
  if (!metrics.contains(attribute) || !metrics.at(attribute).is_number()) return {};
  return metrics.at(attribute).get<double>();
}

namespace {

/// True if the report's validation has finished and neither it nor the report has the metric. NaN, which JSON stores as
/// null, counts as having it.
bool is_validated_without(const Json& metrics, const std::string& attribute) {
  if (attribute.empty() || status_from(metrics) != CheckpointStatus::validated) return false;
  const auto value = metrics.find(attribute);
  return value == metrics.end() || !(value->is_number() || value->is_null());
}

/// Moves the names that point to checkpoint `index`: each goes to the newest checkpoint in `names` whose report gave
/// the same name.
void move_links(const storage::Tier& tier, int index, const std::map<int, std::string>& names) {
  for (const auto& moved : tier.names(index))
    for (const auto& [kept, name] : names | std::views::reverse) {
      if (name != moved) continue;
      tier.set_name(kept, name);
      break;
    }
}

}  // namespace

void prune(const storage::Tier& tier, const CheckpointConfig& config, bool keep_pending,
           const std::function<bool(std::int64_t training_iteration)>& needed) noexcept {
  if (!config.num_to_keep) return;
  try {
    const auto rollbacks = read_rollbacks(tier.folder());
    std::vector<ScoredCheckpoint> checkpoints;
    std::map<int, std::string> names;  // by index, the names that reports gave
    std::set<int> without_score;       // indices of checkpoints whose finished validation lacks the score
    for (const auto& [index, path] : tier.list().published) try {
        const auto manifest = read_manifest(path);
        if (manifest.index != index) continue;  // somebody has copied another checkpoint to this name
        const auto metrics = with_validation(path, manifest.metrics);
        const bool gone = is_rolled_back(rollbacks, index);
        const bool is_needed =
            (keep_pending && status_from(metrics) == CheckpointStatus::pending_validation) ||
            (needed && metrics.is_object() && needed(metrics.value("training_iteration", std::int64_t{0})));
        if (const auto name = manifest.metrics.value("checkpoint_name", Json()); name.is_string() && !gone)
          names.emplace(index, name);
        if (!gone && is_validated_without(metrics, config.checkpoint_score_attribute)) without_score.insert(index);
        checkpoints.push_back({index, score_of(metrics, config.checkpoint_score_attribute), gone, !gone && is_needed});
      } catch (const Error&) {
        // A damaged checkpoint neither counts nor is removed; the next resume renames it.
      }
    // If no checkpoint has a score, the attribute may be misspelt. Then it is not known which checkpoints are the best,
    // and the checkpoints that lack the score are kept.
    if (std::ranges::none_of(checkpoints, [](const auto& checkpoint) { return checkpoint.score.has_value(); }))
      for (auto& checkpoint : checkpoints) checkpoint.pinned |= without_score.contains(checkpoint.index);
    const auto removed = indices_to_prune(std::move(checkpoints), config);
    for (const int index : removed) names.erase(index);
    for (const int index : removed) {
      move_links(tier, index, names);
      tier.remove(index);
    }
  } catch (const std::exception& error) {
    log::warn(str("removing old checkpoints: ", error.what()));
  }
}

}  // namespace muster::detail::checkpoint
