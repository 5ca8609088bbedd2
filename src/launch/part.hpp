// The settings of a launch that is part of another launch: the ranks of a trial, and what its sweep decides for it.
#pragma once

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

}  // namespace muster::detail::launch
