// Read-only views of a run's checkpoints from one process, without communication. list_checkpoints() and
// verify_checkpoint() (muster/checkpoint.hpp) are implemented here too.
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

/// Returns the index in the manifest of a folder in the run that is named checkpoint_`index`, if it is another one.
/// Then somebody has copied a checkpoint under that name, and the folder is no checkpoint of the run. Returns none if
/// the indices are equal, or if the manifest cannot be read.
std::optional<int> copied_index(int index, const std::filesystem::path& folder);
/// Returns newest_not_rolled_back() the listing, and removes the copies from the listing that it passes over; see
/// copied_index().
std::optional<std::pair<int, std::filesystem::path>> newest_own(storage::Tier::Listing& there,
                                                                const std::vector<Rollback>& rollbacks);
/// Returns the index of the run's next checkpoint. No checkpoint, intact or damaged, no interrupted save and no
/// rollback has this index or a higher one. Indices of copies do not count, nor do indices of unreadable folders that
/// are more than a million higher than the others: no save has made these. Their names are taken all the same. Throws
/// an Error (ExitCode::data) if there is no such index.
int next_index(const std::filesystem::path& run);

/// Returns the newest checkpoint whose manifest and file sizes are intact. Skips rolled-back checkpoints silently and
/// damaged ones with a warning. Throws an Error (ExitCode::retry) if a checkpoint cannot be read.
std::optional<std::filesystem::path> newest_intact(const std::filesystem::path& run);

/// Returns the checkpoints that are intact and that none of these rollbacks gives up, oldest first.
std::vector<CheckpointInfo> intact_checkpoints(const std::filesystem::path& run,
                                               const std::vector<Rollback>& rollbacks);

/// Runs `look` and returns the message of its Error if that means damaged content (ExitCode::data); otherwise an empty
/// string. Rethrows NewerFormat and all other errors, such as a failure to read.
std::string data_problem(const std::function<void()>& look);

/// Returns the preprocessor's state in a published checkpoint; null if it has none.
MUSTER_INTERNAL_API Json preprocessor_state(const std::filesystem::path& checkpoint);

}  // namespace muster::detail::checkpoint
