// Work that may fail on any rank, and that all ranks must hear of alike.
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

/// Runs `work` on every rank and gives all ranks the result of each. If it throws on any, all throw the same Error:
/// that of the lowest rank on which it did, named with its host unless all ranks say the same. Collective; no rank
/// leaves before all have come.
std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work);

/// Runs `work` on rank 0 alone and gives all ranks its result, or the Error that it threw. Collective.
std::string on_root(const Communicator& communicator, const std::function<std::string()>& work);
template <class Work>
requires std::is_void_v<std::invoke_result_t<Work>>
void on_root(const Communicator& communicator, const Work& work) {
  on_root(communicator, [&] { return work(), std::string(); });
}

/// How long a rank waits for the others at the end of the work.
struct WaitLimits {
  std::chrono::milliseconds done;    ///< where its own has gone well
  std::chrono::milliseconds failed;  ///< after a failure
};

/// Runs `work`, in which the ranks talk to each other, on every rank and returns the root cause if it failed on any:
/// the same Error everywhere. A rank that fails is heard at once by those that wait for it. `errors` becomes what each
/// rank that did not end well says, by rank. Past the limit Lost is thrown. An attempt within another throws what has
/// ended that one on a rank that is not in this one. Collective over the world.
std::optional<Error> attempt_on_all(const Communicator& world, const WaitLimits& limits,
                                    const std::function<void()>& work, std::map<int, std::string>* errors = nullptr);

/// Runs `work`, in which they do not talk to each other, and throws the root cause. Collective over the world.
void check_on_all(const Communicator& world, const WaitLimits& limits, const std::function<void()>& work);

}  // namespace muster::detail::comm
