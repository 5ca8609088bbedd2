// What a page shows of a run's traces (RunConfig::profile).
#pragma once

#include <muster/json.hpp>

#include <filesystem>

namespace muster::tool::report {

/// The newest traces of the run, each with its file's name, its number of ranks, the spans that took the most time
/// together, and the ranks that others waited for. Files that are no traces of muster are left out.
Json traces_of(const std::filesystem::path& run);

}  // namespace muster::tool::report
