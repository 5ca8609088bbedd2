// Measures how long training waits for an asynchronous save.
#pragma once

#include "rounds.hpp"

#include <muster/launch.hpp>

namespace muster::bench {

/// Compares a report with a state of 420 MB with a plain copy of that state on every rank. With `fused`, the state
/// belongs to a fused Adam, and the time is that of a report and of what the save costs later: of the next step with
/// forward and backward pass, minus their time without a save. The writing in the background has ended before that
/// step, so only the time for which training waits is counted. Collective.
Timings measure_stall(Launch& launch, bool fused, const Measurement& measurement);

}  // namespace muster::bench
