// The program with muster, on all ranks of a communicator.
#pragma once

#include "muster/communicator.hpp"
#include "soak/side.hpp"

#include <memory>

namespace muster::soak {

/// Collective, as are all its member functions.
std::unique_ptr<Side> make_prepared(const Program& program, const Communicator& world);

/// The same with DataParallel, which knows no weights by datasets (Pass::weighted) and chooses the exchange itself.
/// Collective, as are all its member functions.
std::unique_ptr<Side> make_own_loop(const Program& program, const Communicator& world);

}  // namespace muster::soak
