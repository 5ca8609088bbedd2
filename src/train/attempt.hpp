// Work that all ranks do together and that ends alike on all of them.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <functional>
#include <optional>

namespace muster::detail::train {

/// How long ranks wait for each other.
struct Patience {
  std::chrono::milliseconds done;    ///< one that is through, for the others
  std::chrono::milliseconds failed;  ///< after a failure
};

/// Runs `work`, in which the ranks talk to each other, on every rank and returns the root cause if it failed on any:
/// the same Error everywhere. A rank that fails is heard at once by those that wait for it. Past the patience
/// comm::Lost is thrown. Collective over the world.
std::optional<Error> attempt(const Communicator& world, const Patience& patience, const std::function<void()>& work);

/// Runs `work`, in which they do not, and throws the root cause. Collective over the world.
void check_together(const Communicator& world, const Patience& patience, const std::function<void()>& work);

}  // namespace muster::detail::train
