// Runs whose checkpoints are validated, in one process per rank.
#pragma once

#include "muster/communicator.hpp"
#include "soak/driver.hpp"

#include <string>

namespace muster::soak::validated_runs {

/// Plays the run of a round. Returns what is wrong on this rank; empty if nothing is. Collective.
std::string play(const Round& round, const Communicator& world);

}  // namespace muster::soak::validated_runs
