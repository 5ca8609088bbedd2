// What a launch consists of that is a part of another: the ranks of a trial, and what its sweep decides for it.
#pragma once

#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"

#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::launch {

struct Part {
  Communicator ranks;  ///< a world of their own
  LaunchFlags flags;
  std::function<bool()> asked_to_stop = {};  ///< beside what the whole launch was asked for; throws nothing
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};

}  // namespace muster::detail::launch
