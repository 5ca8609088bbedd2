// Work that may fail on any rank. All ranks get the same error.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace muster::detail::comm {

/// Runs `work` on every rank and returns the results of all ranks on each. If it throws on any, all ranks throw the
/// same Error, the one of the lowest failed rank; it names that rank and its host unless all ranks have the same error.
/// Collective; no rank returns before all have come.
std::vector<std::string> run_on_all(const Communicator& communicator, const std::function<std::string()>& work);

/// Runs `work` on rank 0 alone. All ranks return its result or throw the Error that it threw. Collective.
std::string run_on_root(const Communicator& communicator, const std::function<std::string()>& work);
template <class Work>
requires std::is_void_v<std::invoke_result_t<Work>>
void run_on_root(const Communicator& communicator, const Work& work) {
  run_on_root(communicator, [&] { return work(), std::string(); });
}

/// How long a rank waits for the others at the end of the work.
struct WaitLimits {
  std::chrono::milliseconds done;    ///< if this rank's own work succeeded
  std::chrono::milliseconds failed;  ///< if it failed
};

/// Runs `work`, in which the ranks communicate, on every rank. If it fails on any, all ranks return the same root
/// cause. A failure ends the waits of the other ranks at once. `errors` gets the error text of each rank that did not
/// succeed, by rank. Throws RanksMissing past the limit. A nested attempt throws the error that has ended the outer
/// attempt on a rank that never entered the nested one. Collective over the world.
std::optional<Error> attempt_on_all(const Communicator& world, const WaitLimits& limits,
                                    const std::function<void()>& work, std::map<int, std::string>* errors = nullptr);

/// Runs `work`, in which the ranks do not communicate, on every rank and throws the root cause if it fails on any.
/// Collective over the world.
void check_on_all(const Communicator& world, const WaitLimits& limits, const std::function<void()>& work);

}  // namespace muster::detail::comm
