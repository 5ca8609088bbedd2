// The settings of a launch that is part of another launch: the ranks of a trial, and what its sweep decides for it.
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
  Communicator ranks;  ///< all ranks of a separate world
  LaunchFlags flags;
  std::function<bool()> asked_to_stop = {};  ///< true to stop this part while the whole launch goes on; throws nothing
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};

/// Returns the next sweep's number in the launch with these flags, from 1 on, as Launch::next_trainer_number() does for
/// trainers.
MUSTER_INTERNAL_API int next_sweep_number(const LaunchFlags& of);

}  // namespace muster::detail::launch
