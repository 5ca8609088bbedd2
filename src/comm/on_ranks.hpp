// Work that may fail on any rank, and that all ranks must hear of alike.
#pragma once

#include "muster/communicator.hpp"

#include <functional>
#include <string>
#include <vector>

namespace muster::detail::comm {

/// Runs `work` on every rank and gives all ranks the result of each. If it throws on any, all throw the same Error:
/// that of the lowest rank on which it did, named with its host unless all ranks say the same. Collective; no rank
/// leaves before all have come.
std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work);

/// Runs `work` on rank 0 alone and gives all ranks its result, or the Error that it threw. Collective.
std::string on_root(const Communicator& communicator, const std::function<std::string()>& work);

}  // namespace muster::detail::comm
