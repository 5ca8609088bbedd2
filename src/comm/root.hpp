// The root decides, everyone hears.
#pragma once

#include "muster/communicator.hpp"

#include <functional>
#include <string>

namespace muster::comm {

/// Calls `decide` on rank 0 alone and gives its value to all; what it throws is thrown on all alike, an Error as an
/// Error with the same code and text, anything else with ExitCode::user_error. Collective.
std::string root_decides(const Communicator& communicator, const std::function<std::string()>& decide);

}  // namespace muster::comm
