// The newest checkpoint of a run that is not this job's: nothing is renamed there.
#pragma once

#include <filesystem>
#include <optional>

namespace muster::detail::checkpoint {

/// The newest whose manifest and file sizes are whole; those that were given up are passed over, and damaged ones with
/// a warning. An Error (ExitCode::retry) if one cannot be read.
std::optional<std::filesystem::path> newest_readable(const std::filesystem::path& run);

}  // namespace muster::detail::checkpoint
