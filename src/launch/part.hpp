// What a launch goes by: its ranks and its flags. A sweep makes one for each trial, on a part of the ranks, with what
// it decides for the trial.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::launch {

struct LaunchPart {
  Communicator ranks;  ///< all ranks of a world of its own
  LaunchFlags flags = {};
  std::function<bool()> asked_to_stop = {};  ///< true to stop this part while the whole launch goes on; throws nothing
  std::vector<std::shared_ptr<Callback>> callbacks = {};

  /// Returns the next sweep's number in a launch, from 1 on, as Launch::next_trainer_number() does for trainers.
  MUSTER_INTERNAL_API static int next_sweep_number(const Launch& launch);
};

}  // namespace muster::detail::launch
