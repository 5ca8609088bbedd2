// The ranks and flags of a launch. A sweep makes a LaunchPart for each trial, with some of the ranks and with the flags
// that it chooses for the trial.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::launch {

/// The ranks of a launch, with their flags and callbacks.
struct LaunchPart {
  Communicator ranks;  ///< all ranks of this part, in a world of their own
  LaunchFlags flags = {};
  std::function<bool()> asked_to_stop = {};  ///< true if this part alone must stop; throws nothing
  std::vector<std::shared_ptr<Callback>> callbacks = {};

  /// Returns the next sweep's number in a launch, from 1 on, as Launch::next_trainer_number() does for trainers.
  MUSTER_INTERNAL_API static int next_sweep_number(const Launch& launch);
};

}  // namespace muster::detail::launch
