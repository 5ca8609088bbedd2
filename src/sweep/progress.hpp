// How far a sweep has progressed, for `muster run`, which counts failures since the last progress. Uses no torch.
#pragma once

#include <filesystem>

namespace muster::detail::sweep {

/// The trial that begins first, in the sweep's folder: its params.json has the options that all trials share.
inline constexpr const char* first_trial = "trial_00000";

/// A number that grows with every checkpoint of the run in that folder, or of a trial in it, and with every trial that
/// ends well; -1 before the first.
int progress(const std::filesystem::path& folder);

}  // namespace muster::detail::sweep
