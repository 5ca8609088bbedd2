// The trials of a space: a pure function of it and a seed.
#pragma once

#include "muster/sweep.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::sweep {

/// The settings of one trial, and the number of its sample.
struct Point {
  Config config = Config::object();
  int sample = 0;
};

/// All of them, in the order of trials. An Error (ExitCode::usage) where a setting has no name, or two have the same or
/// one inside the other. What a trial is given depends on the seed, its number and the name of the setting alone.
std::vector<Point> points_of(const Space& space, int num_samples, std::uint64_t seed);

}  // namespace muster::detail::sweep
