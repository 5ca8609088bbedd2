// Rollbacks: `--resume RUN/checkpoint_000003` makes the run go on from there and rolls back those after it.
// RUN/steps_back.json keeps that, so that it is done once, and so that nothing goes on from what was rolled back:
//   [{"to": 3, "over": 5, "name": "best", "time": "2026-01-31T12:00:00Z"}, …]
// Oldest first; 4 and 5 are rolled back. "name" is how the checkpoint was named, since a name may lead elsewhere later.
#pragma once

#include "checkpoint/tier.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

struct Rollback {
  int to = 0;
  int over = 0;           ///< the highest index that there was
  std::string name = {};  ///< of the checkpoint, as it was asked for; empty if nobody knows
};

/// Those of a run, none where it has no such file. An Error (ExitCode::data) if the file is damaged.
std::vector<Rollback> read_rollbacks(const std::filesystem::path& run);
/// Adds one, durably.
void add_rollback(const std::filesystem::path& run, const Rollback& rollback);

/// Whether the checkpoint is not part of what led to the run as it stands now.
bool rolled_back(const std::vector<Rollback>& rollbacks, int index) noexcept;

/// The newest published one that is not rolled back: index and path.
std::optional<std::pair<int, std::filesystem::path>> newest_of(const Tier::Listing& there,
                                                               const std::vector<Rollback>& rollbacks);

}  // namespace muster::detail::checkpoint
