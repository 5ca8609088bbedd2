// Helpers for tests with ranks.
#pragma once

#include "muster/communicator.hpp"

#include <filesystem>

namespace muster::test {

/// All ranks of the test.
const Communicator& world();

/// An empty folder that all ranks share and that goes with the program. Collective; a new one at each call.
std::filesystem::path shared_folder();

}  // namespace muster::test
