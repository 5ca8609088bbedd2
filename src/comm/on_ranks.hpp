// Runs work that may fail on any rank, and gives all ranks the same error.
#pragma once

#include "base/export.hpp"
#include "base/json.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::detail::comm {

/// Implement run_on_all() and run_on_root(), with results as bytes.
MUSTER_INTERNAL_API std::vector<std::string> run_packed_on_all(const Communicator& communicator,
                                                               const std::function<std::string()>& work);
MUSTER_INTERNAL_API std::string run_packed_on_root(const Communicator& communicator,
                                                   const std::function<std::string()>& work);

/// A result of type T as bytes: text as it is, any other type as JSON in CBOR.
template <class T>
std::string pack_result(const T& result) {
  if constexpr (std::is_same_v<T, std::string>) {
    return result;
  } else {
    return json_to_cbor(result);
  }
}
template <class T>
T unpack_result(std::string bytes) {
  if constexpr (std::is_same_v<T, std::string>)
    return bytes;
  else if constexpr (std::is_same_v<T, Json>)
    return json_from_cbor(bytes);
  else
    return json_from_cbor(bytes).template get<T>();
}

/// Runs `work` on every rank and returns the results of all ranks on each; nothing if `work` returns nothing. If it
/// throws on any, all ranks throw the same Error, the one of the lowest failed rank; it names that rank and its host
/// unless all ranks have the same error. Collective; no rank returns before all have come.
template <class Work>
auto run_on_all(const Communicator& communicator, const Work& work) {
  using Result = std::invoke_result_t<Work>;
  if constexpr (std::is_void_v<Result>) {
    run_packed_on_all(communicator, [&] { return work(), std::string(); });
  } else {
    std::vector<Result> results;
    for (auto& bytes : run_packed_on_all(communicator, [&] { return pack_result<Result>(work()); }))
      results.push_back(unpack_result<Result>(std::move(bytes)));
    return results;
  }
}

/// Throws an Error (ExitCode::usage), the same on all ranks, that names the first option that differs from rank 0's.
/// `mine` has this rank's options by name, the same names on every rank. `whose` is named in the error. Collective.
MUSTER_INTERNAL_API void require_same_options(const Communicator& communicator, const std::string& whose,
                                              const Json& mine);

/// Waits until all ranks have come, or throws the Error with which a rank has failed in another run_on_all().
/// Collective.
inline void wait_for_all(const Communicator& communicator) {
  run_on_all(communicator, [] {});
}

/// Runs `work` on rank 0 alone. All ranks return its result or throw the Error that it threw. Collective.
template <class Work>
auto run_on_root(const Communicator& communicator, const Work& work) {
  using Result = std::invoke_result_t<Work>;
  if constexpr (std::is_void_v<Result>)
    run_packed_on_root(communicator, [&] { return work(), std::string(); });
  else
    return unpack_result<Result>(run_packed_on_root(communicator, [&] { return pack_result<Result>(work()); }));
}

/// How long a rank waits for the others at the end of the work.
struct Timeouts {
  std::chrono::milliseconds done;    ///< if this rank's own work succeeded
  std::chrono::milliseconds failed;  ///< if it failed
};

/// Runs `work`, in which the ranks communicate, on every rank. If it fails on any, all ranks return the same root
/// cause. A failure ends the waits of the other ranks at once. `errors` gets the error text of each rank that did not
/// succeed, by rank. Throws RanksMissing past the timeout. If this call is inside another one, which has failed on a
/// rank before it came here, throws that rank's error. Collective over the world.
MUSTER_INTERNAL_API std::optional<Error> attempt_on_all(const Communicator& world, const Timeouts& timeouts,
                                                        const std::function<void()>& work,
                                                        std::map<int, std::string>* errors = nullptr);

/// Runs `work`, in which the ranks do not communicate, on every rank and throws the root cause if it fails on any.
/// Collective over the world.
MUSTER_INTERNAL_API void check_on_all(const Communicator& world, const Timeouts& timeouts,
                                      const std::function<void()>& work);

}  // namespace muster::detail::comm
