// The program without muster: this process alone computes the gradient of every rank's batch, takes their weighted
// mean, and steps torch's own optimizer.
#pragma once

#include "soak/side.hpp"

#include <memory>

namespace muster::soak {

std::unique_ptr<Side> make_reference(const Program& program);

}  // namespace muster::soak
