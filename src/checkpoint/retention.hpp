// Which checkpoints stay.
#pragma once

#include "checkpoint/tier.hpp"
#include "muster/config.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace muster::detail::checkpoint {

struct Scored {
  int index = 0;
  std::optional<double> score;  ///< none, or NaN, is worse than any
  bool rolled_back = false;     ///< by a step back: worse than all others
  bool pinned = false;  ///< it waits for its validation, or its row for that, and stays beside those that are kept
};

/// The indices that may go, oldest first: all but the num_to_keep best, or newest where there is no score attribute.
/// The newest that is not rolled back always stays, beside the best if it is not one of them. Of equal scores the newer
/// is the better.
std::vector<int> surplus(std::vector<Scored> checkpoints, const CheckpointConfig& config);

/// The score in the metrics of a report.
std::optional<double> score_of(const Json& metrics, const std::string& attribute);

/// Removes those that may go; a failure is a warning. What is `needed`, by the number of its report, stays as one that
/// waits for its validation does. By one rank.
void prune(const Tier& tier, const CheckpointConfig& config,
           const std::function<bool(std::int64_t training_iteration)>& needed = {}) noexcept;

}  // namespace muster::detail::checkpoint
