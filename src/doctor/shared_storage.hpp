// Checks whether all nodes see the same storage.
#pragma once

#include "doctor/checks.hpp"
#include "muster/communicator.hpp"

namespace muster::detail::doctor {

/// Rank 0 writes a file in a temporary folder and locks it. The first rank of each other node looks for the file at the
/// same path and returns {"path": …, "seen": bool, "after_s": …, "sees_lock": bool}. Returns null on all other ranks,
/// and everywhere if rank 0 cannot write there. Collective.
Json try_shared_storage(const Communicator& world, const std::filesystem::path& storage);
/// `writer`: the host of rank 0.
Findings check_shared_storage(const Json& facts, const std::string& writer);

}  // namespace muster::detail::doctor
