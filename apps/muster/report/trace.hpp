// Reads from a run's traces (RunConfig::profile) what a page shows of them.
#pragma once

#include <muster/json.hpp>

#include <filesystem>

namespace muster::tool::report {

/// Returns the newest traces of the run. Each has the file's name, the number of ranks, the spans with the longest
/// total time, and the ranks that others have waited for. Files that are no traces of muster, and very large ones, are
/// left out.
Json traces_of(const std::filesystem::path& run);

}  // namespace muster::tool::report
