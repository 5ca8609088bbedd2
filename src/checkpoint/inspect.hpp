// What one process sees of a run's checkpoints, its own or another job's; nothing is renamed. Beside list_checkpoints()
// and verify_checkpoint():
#pragma once

#include <filesystem>
#include <optional>

namespace muster::detail::checkpoint {

/// The newest whose manifest and file sizes are whole; those that were rolled back are passed over, and damaged ones
/// with a warning. An Error (ExitCode::retry) if one cannot be read.
std::optional<std::filesystem::path> newest_whole(const std::filesystem::path& run);

}  // namespace muster::detail::checkpoint
