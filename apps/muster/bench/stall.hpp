// How long training stands still for a save that goes on behind it.
#pragma once

#include "rounds.hpp"

#include <muster/launch.hpp>

namespace muster::bench {

/// A report with a state of 420 MB against a copy of it on every rank. With `fused` the state is that of a fused Adam:
/// what is timed then is a report and the next step with the forward() after it, less what they take without a save;
/// the writing itself is over by that step, so that only what training waits for is counted. Collective.
Timings measure_stall(Launch& launch, bool fused, const Rounds& rounds, const Progress& progress);

}  // namespace muster::bench
