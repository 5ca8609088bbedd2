// Read-only views of a run's checkpoints from one process, without communication. list_checkpoints() and
// verify_checkpoint() (muster/checkpoint.hpp) are implemented here too.
#pragma once

#include "checkpoint/rollbacks.hpp"
#include "muster/checkpoint.hpp"

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// Returns the newest checkpoint whose manifest and file sizes are intact. Skips rolled-back checkpoints silently and
/// damaged ones with a warning. Throws an Error (ExitCode::retry) if a checkpoint cannot be read.
std::optional<std::filesystem::path> newest_whole(const std::filesystem::path& run);

/// Returns the checkpoints that are intact and that none of these rollbacks gives up, oldest first.
std::vector<CheckpointInfo> reported(const std::filesystem::path& run, const std::vector<Rollback>& rollbacks);

/// Runs `look` and returns the message of its Error if that means damaged content (ExitCode::data); otherwise an empty
/// string. Rethrows NewerFormat and all other errors, such as a failure to read.
std::string problem_seen(const std::function<void()>& look);

}  // namespace muster::detail::checkpoint
