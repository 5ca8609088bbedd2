// Examines a run's checkpoints from one process, without communication and without changing them. Also implements
// list_checkpoints() and verify_checkpoint() (muster/checkpoint.hpp).
#pragma once

#include "base/export.hpp"
#include "checkpoint/rollbacks.hpp"
#include "muster/checkpoint.hpp"
#include "storage/tier.hpp"

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

/// For the folder checkpoint_`index` of a run: returns the index in its manifest if that is another one. Then somebody
/// has copied a checkpoint to that name, and the folder is no checkpoint of the run. Returns none if the indices are
/// equal, or if the manifest cannot be read.
std::optional<int> copied_index(int index, const std::filesystem::path& folder);
/// Returns the newest published checkpoint that is neither rolled back nor a copy (copied_index()). Removes the copies
/// that it passes over from `there`.
std::optional<std::pair<int, std::filesystem::path>> newest_own(storage::Tier::Listing& there,
                                                                const std::vector<Rollback>& rollbacks);
/// Returns the index of the run's next checkpoint: higher than the index of every checkpoint, intact or damaged, every
/// interrupted save and every rollback. It ignores copies, and unreadable folders whose index is more than a million
/// higher than the others', since no save has made them; but a save cannot use the indices in their names. Throws an
/// Error (ExitCode::data) if the next index would be above Tier::max_index.
int next_index(const std::filesystem::path& run);

/// Returns the newest checkpoint whose manifest and file sizes are intact. Skips rolled-back checkpoints and copies,
/// and damaged checkpoints with a warning. Throws an Error (ExitCode::retry) if a checkpoint cannot be read, and
/// NewerFormat for one in a newer format.
std::optional<std::filesystem::path> newest_intact(const std::filesystem::path& run);

/// Returns the checkpoints whose manifest and file sizes are intact, oldest first, without rolled-back ones and copies.
std::vector<CheckpointInfo> intact_checkpoints(const std::filesystem::path& run,
                                               const std::vector<Rollback>& rollbacks);

/// Calls `look`. If it throws an Error that means damaged content (ExitCode::data), returns the message; if it throws
/// nothing, returns an empty string. Rethrows NewerFormat and all other errors, such as a failure to read.
std::string data_problem(const std::function<void()>& look);

/// Returns the preprocessor's state in a published checkpoint; null if the checkpoint has none.
MUSTER_INTERNAL_API Json preprocessor_state(const std::filesystem::path& checkpoint);

}  // namespace muster::detail::checkpoint
