// Decides which checkpoints to keep, and removes the others.
#pragma once

#include "muster/config.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace muster::detail::checkpoint {

/// A checkpoint, and the facts that decide whether it is kept.
struct ScoredCheckpoint {
  int index = 0;
  std::optional<double> score;  ///< none, or NaN, counts as lower than every number
  bool rolled_back = false;     ///< if true, it counts as worse than all checkpoints that are not rolled back
  /// If true, something still needs it, such as its validation; it is kept in addition to num_to_keep.
  bool pinned = false;
};

/// Returns the indices of the checkpoints to remove, oldest first. Keeps the num_to_keep best; without a score
/// attribute, the newest. Of two checkpoints with equal scores, the newer is the better. Always keeps the newest
/// checkpoint that is not rolled back, even if it is one more than num_to_keep.
std::vector<int> indices_to_prune(std::vector<ScoredCheckpoint> checkpoints, const CheckpointConfig& config);

/// Returns the metric named `attribute` of a report; none if it is missing or not a number.
std::optional<double> score_of(const Json& metrics, const std::string& attribute);

/// Removes the checkpoints that `config` does not keep; without num_to_keep, none. A name that points to a removed
/// checkpoint goes to the newest kept checkpoint whose report gave this name, too; if there is none, the name is
/// removed. Keeps checkpoints for whose report `needed` returns true, and with `keep_pending` checkpoints whose
/// validation is pending, unless they are rolled back. If no checkpoint has a score, keeps the checkpoints whose
/// finished validation lacks it. Leaves damaged checkpoints and copies alone. Any failure only logs a warning. Not
/// collective; for one rank.
void prune(const storage::Tier& tier, const CheckpointConfig& config, bool keep_pending,
           const std::function<bool(std::int64_t training_iteration)>& needed = {}) noexcept;

}  // namespace muster::detail::checkpoint
