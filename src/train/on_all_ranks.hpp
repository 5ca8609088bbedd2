// Work of all ranks that ends alike on all of them.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <functional>
#include <optional>

namespace muster::detail::train {

/// How long a rank waits for the others at the end of the work.
struct WaitLimits {
  std::chrono::milliseconds done;    ///< where its own has gone well
  std::chrono::milliseconds failed;  ///< after a failure
};

/// Runs `work`, in which the ranks talk to each other, on every rank and returns the root cause if it failed on any:
/// the same Error everywhere. A rank that fails is heard at once by those that wait for it. Past the limit comm::Lost
/// is thrown. Collective over the world.
std::optional<Error> try_on_all_ranks(const Communicator& world, const WaitLimits& limits,
                                      const std::function<void()>& work);

/// Runs `work`, in which they do not talk to each other, and throws the root cause. Collective over the world.
void check_on_all_ranks(const Communicator& world, const WaitLimits& limits, const std::function<void()>& work);

}  // namespace muster::detail::train
