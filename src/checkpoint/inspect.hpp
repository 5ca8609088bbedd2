// What one process sees of a run's checkpoints; nothing is renamed. Beside list_checkpoints() and verify_checkpoint():
#pragma once

#include "muster/checkpoint.hpp"

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// The newest whose manifest and file sizes are whole; those that were rolled back are passed over, and damaged ones
/// with a warning. An Error (ExitCode::retry) if one cannot be read.
std::optional<std::filesystem::path> newest_whole(const std::filesystem::path& run);

/// Those that are whole and led to where the run stands, oldest first.
std::vector<CheckpointInfo> reported(const std::filesystem::path& run);

/// What `look` finds wrong with a checkpoint's content, or empty. What could not be read stays an error.
std::string problem_seen(const std::function<void()>& look);

}  // namespace muster::detail::checkpoint
