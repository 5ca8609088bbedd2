// The start of a run in its folder, unless it is finished already.
#pragma once

#include "train/resolve.hpp"
#include "train/run_folder.hpp"

namespace muster::detail::train {

/// Clears away what an interrupted job has left half written, writes params.json and says what begins. False, with a
/// message, where the run is finished and was asked for the same. Collective over the launch.
bool start(const Plan& plan, RunFolder& run);

}  // namespace muster::detail::train
