// Rollbacks: `--resume RUN/checkpoint_000003` makes the run continue from checkpoint 3 and rolls back all later
// checkpoints. RUN/steps_back.json records each rollback, so that each happens only once and no start resumes from a
// rolled-back checkpoint:
//   [{"to": 3, "over": 5, "name": "best", "tiers": [ID, …], "time": "2026-01-31T12:00:00Z"}, …]
// The oldest entry comes first. In this example, checkpoints 4 and 5 are rolled back. "name" is the name by which the
// user chose the checkpoint; it is recorded since the name may refer to another checkpoint later. "tiers" are the fast
// tiers of earlier jobs that may hold newer checkpoints; the checkpoints in them are rolled back, too. One file records
// the rollback of checkpoints and of tiers, so that a killed job cannot record one without the other.
#pragma once

#include "storage/tier.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

/// One entry of steps_back.json.
struct Rollback {
  int to = 0;                           ///< index of the checkpoint that the run continues from
  int last_index = 0;                   ///< "over": the highest index in use at the time of the rollback
  std::string name = {};                ///< the user's name for the checkpoint; empty if none is known
  std::vector<std::string> tiers = {};  ///< IDs of the fast tiers whose checkpoints were rolled back, too
};

/// Returns a run's rollbacks; none if it has no such file. Throws an Error (ExitCode::data) if the file is damaged.
std::vector<Rollback> read_rollbacks(const std::filesystem::path& run);
/// Appends a rollback to the file, durably.
void add_rollback(const std::filesystem::path& run, const Rollback& rollback);

/// True if the checkpoint with this index is rolled back.
bool is_rolled_back(const std::vector<Rollback>& rollbacks, int index) noexcept;

/// Returns index and path of the newest published checkpoint that is not rolled back.
std::optional<std::pair<int, std::filesystem::path>> newest_not_rolled_back(const storage::Tier::Listing& there,
                                                                            const std::vector<Rollback>& rollbacks);

}  // namespace muster::detail::checkpoint
