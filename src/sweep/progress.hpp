// How far a sweep has come, for `muster run`, which counts failures since the last progress. Uses no torch.
#pragma once

#include "base/export.hpp"
#include "run/failures.hpp"

#include <filesystem>

namespace muster::detail::sweep {

/// Name of the first trial in the sweep's folder; its params.json has the options that all trials share.
inline constexpr const char* first_trial = "trial_00000";

/// Returns the points of the run in this folder and of the trials in it. A trial that has ended well has a second
/// entry, so that its end counts as progress.
MUSTER_INTERNAL_API run::RunPoints progress(const std::filesystem::path& folder);

}  // namespace muster::detail::sweep
