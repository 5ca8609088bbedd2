// The trials of a search space, as a pure function of the space and a seed.
#pragma once

#include "muster/sweep.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::sweep {

/// The settings of one trial, and the number of the sample that they belong to.
struct TrialSettings {
  Config config = Config::object();
  int sample = 0;
};

/// Returns the settings of all trials, in the order of trials. Throws an Error (ExitCode::usage) if a setting has no
/// name, if two settings have the same name or one is inside the other, or if there are too many trials. A setting
/// drawn at random depends only on the seed, the trial's number, and the setting's name and domain.
std::vector<TrialSettings> sample_space(const Space& space, int num_samples, std::uint64_t seed);

}  // namespace muster::detail::sweep
