// A world: what the communicators of a launch, or of separate work, share: the alarm, agreements, timeouts and more.
#pragma once

#include "comm/alarm.hpp"
#include "comm/outcome.hpp"
#include "comm/placement.hpp"
#include "comm/pool.hpp"
#include "comm/presence.hpp"
#include "comm/wait.hpp"
#include "comm/wait_monitor.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::comm {

/// What all communicators of one world share on this rank.
struct World {
  /// Takes three `communicators`, each over all of the world's ranks, whose numbers in the pool are `members`.
  /// Collective.
  World(std::shared_ptr<Pool> its_pool, std::vector<int> its_members, std::vector<PooledCommunicator> communicators,
        Placement where);

  const std::shared_ptr<Pool> pool;
  const std::vector<int> members;  // [rank]: its number in the pool
  Alarm alarm;
  const PooledCommunicator agreement;     // used by agree() and `presence` alone
  Presence presence{agreement};           // of ranks in agreements
  std::int64_t agreements = 0;            // completed so far
  std::atomic<std::int64_t> failures{0};  // agreements so far in which some rank was not done
  int depth = 0;                          // how deep this rank's present attempt is nested
  /// The outcomes that ranks have agreed on in an outer attempt. Another rank was already back in that attempt; this
  /// rank has yet to return to it.
  struct Outer {
    int depth = 0;
    std::vector<Outcome> outcomes;
  };
  std::optional<Outer> outer;
  /// True if `outer` is set: not all ranks would come to a collective call now.
  std::atomic<bool> has_outer{false};
  /// What happens to calls of the thread that uses the world. `given_up`: they throw; see give_up_work().
  /// `left_behind`: they never return, since MPI may end meanwhile; see leave_thread_behind().
  enum class Use { open, given_up, left_behind };
  std::atomic<Use> use{Use::open};
  WaitMonitor wait_monitor;
  const Placement placement;
  struct {
    std::atomic<std::chrono::milliseconds> timeout{default_timeout};  // of every wait
    std::atomic<std::chrono::milliseconds> final_grace{std::chrono::seconds(30)};
  } limits;
};

/// Throws the root cause that an outer attempt has agreed on (World::outer) as RemoteError. This rank has yet to return
/// to that attempt.
[[noreturn]] void throw_outer_cause(const World& world);

/// Call it before MPI is called, and in each wait. Throws an Error (ExitCode::retry) if the work of the world's thread
/// was given up on this rank, or (ExitCode::usage) once MPI is finalised or in a child of fork(); never returns if the
/// thread is left behind.
void require_in_use(const World& world);

}  // namespace muster::detail::comm
