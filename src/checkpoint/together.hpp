// Work that may fail on any rank, and that all ranks must hear of alike.
#pragma once

#include "muster/communicator.hpp"

#include <functional>
#include <string>
#include <vector>

namespace muster::checkpoint {

/// Runs `work` on every rank and gives all ranks the result of each. If it throws on any, all throw the same Error:
/// that of the lowest rank on which it did, named with its host. Collective; no rank leaves before all have come.
std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work);

/// The same for work of rank 0 alone, whose result all get.
std::string on_root(const Communicator& communicator, const std::function<std::string()>& work);

}  // namespace muster::checkpoint
