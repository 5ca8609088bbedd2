// The program with muster, on all ranks of a communicator.
#pragma once

#include "muster/communicator.hpp"
#include "soak/side.hpp"

#include <memory>

namespace muster::soak {

/// Collective, as are all its member functions.
std::unique_ptr<Side> make_prepared(const Program& program, const Communicator& world);

}  // namespace muster::soak
