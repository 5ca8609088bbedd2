// Decides which checkpoints to keep, and removes the others.
#pragma once

#include "muster/config.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace muster::detail::checkpoint {

/// A checkpoint and what decides whether it is kept.
struct ScoredCheckpoint {
  int index = 0;
  std::optional<double> score;  ///< no score, and NaN, rank below every number
  bool rolled_back = false;     ///< ranks below all checkpoints that are not rolled back
  bool pinned = false;          ///< still needed, for example by its validation: kept in addition to num_to_keep
};

/// Returns the indices of the checkpoints to remove, oldest first. The num_to_keep best stay, or the newest if there is
/// no score attribute. The newest checkpoint that is not rolled back always stays, in addition if it is not among the
/// best. Of two checkpoints with equal scores the newer ranks higher.
std::vector<int> indices_to_prune(std::vector<ScoredCheckpoint> checkpoints, const CheckpointConfig& config);

/// Returns the metric named `attribute` of a report; none if it is missing or not a number.
std::optional<double> score_of(const Json& metrics, const std::string& attribute);

/// Removes surplus checkpoints. A name that points to one of them goes to the newest kept checkpoint that had it too,
/// or is removed if there is none. A failure only logs a warning. A checkpoint for whose report `needed` returns true
/// is kept, and with `keep_pending` one whose validation is pending. As long as none has a score, those stay whose
/// validation should have given it. Called by one rank.
void prune(const storage::Tier& tier, const CheckpointConfig& config, bool keep_pending,
           const std::function<bool(std::int64_t training_iteration)>& needed = {}) noexcept;

}  // namespace muster::detail::checkpoint
