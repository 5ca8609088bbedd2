// Work that all ranks do together and that ends alike on all of them.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <functional>
#include <optional>

namespace muster::train {

/// Runs `work` on every rank and returns the root cause if it failed on any: the same Error everywhere. A rank that
/// fails is heard at once by those that wait for it. `patience`: how long a rank that is through waits for the others,
/// `grace`: how long one waits after a failure; past it comm::Lost is thrown. Collective over the world.
std::optional<Error> attempt(const Communicator& world, std::chrono::milliseconds patience,
                             std::chrono::milliseconds grace, const std::function<void()>& work);

}  // namespace muster::train
