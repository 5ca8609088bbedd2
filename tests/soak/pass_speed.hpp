// How fast passes over a dataset begin, plan their samples, and come ahead of a step.
#pragma once

namespace muster::soak {

/// Measures and prints each figure beside its limit. Returns false if one misses it.
bool measure_passes();

}  // namespace muster::soak
