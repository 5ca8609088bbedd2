// How far a sweep has come, for `muster run`, which counts failures since the last progress. Knows no torch.
#pragma once

#include <filesystem>

namespace muster::detail::sweep {

/// The trial that begins first, in the sweep's folder: its params.json has what all trials have alike.
inline constexpr const char* first_trial = "trial_00000";

/// A number that rises with every checkpoint of the run of that folder, or of a trial in it, and with every trial that
/// ends well; -1 before the first.
int progress(const std::filesystem::path& folder);

}  // namespace muster::detail::sweep
