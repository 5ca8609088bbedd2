// Initialises and finalises MPI, and makes worlds: groups of ranks with their own alarms and time limits.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::comm {

/// Initialises MPI (MPI_THREAD_MULTIPLE) unless that is done already, and then finalises it too. One per process.
class MpiScope {
 public:
  MpiScope();
  MpiScope(const MpiScope&) = delete;
  MpiScope& operator=(const MpiScope&) = delete;
  ~MpiScope();

  /// All ranks of MPI_COMM_WORLD.
  const Communicator& world() const noexcept { return *world_; }
  /// True if MPI was initialised here, so that it ends with this object.
  bool owns_mpi() const noexcept { return initialised_here_; }
  /// Waits until all ranks have called it, for as long as that takes. Collective.
  void wait_for_all() const noexcept;

 private:
  bool initialised_here_ = false;
  std::optional<Communicator> world_;
};

/// The nodes of all ranks of a world. A launch finds them by itself; tests make them up.
struct Placement {
  std::vector<int> node_of_rank;   ///< [rank]: any number, equal where ranks share memory
  std::vector<std::string> hosts;  ///< [rank]: the name of its host
};

/// Throws an Error (ExitCode::usage), whose text begins with `doing`, unless MPI is initialised, not finalised, and may
/// be called by this thread. Local.
void require_mpi(const char* doing);

/// True if several threads may call MPI at once (MPI_THREAD_MULTIPLE).
bool threads_may_call_mpi() noexcept;

/// Makes a world of the same ranks with the nodes of `placement`. Ranks on one node must really share memory. Ranks on
/// different nodes communicate by MPI, even if they could share memory. Collective.
Communicator make_world(const Communicator& ranks, Placement placement);

/// Makes a separate world of the same ranks with the same limits, for another thread of each rank or for work that may
/// fail alone: an alarm in one world does not reach the other. Collective.
Communicator make_separate_world(const Communicator& ranks);

/// The limit for every later wait on communicators of this world.
void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit);
std::chrono::milliseconds time_limit(const Communicator& communicator);

/// How long a failed rank waits for the other ranks of this world when nothing will be retried. 30 s by default, so
/// that a failed job ends soon; longer if other work in the job would end with it.
void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace);
std::chrono::milliseconds final_grace(const Communicator& communicator);

/// Sets the time limit while it lives.
class TimeLimit {
 public:
  TimeLimit(const Communicator& communicator, std::chrono::milliseconds limit)
      : communicator_(communicator), before_(time_limit(communicator)) {
    set_time_limit(communicator_, limit);
  }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;
  ~TimeLimit() { set_time_limit(communicator_, before_); }

 private:
  Communicator communicator_;
  std::chrono::milliseconds before_;
};

/// Ends all processes of MPI_COMM_WORLD with that exit code, as a last resort.
[[noreturn]] void abort(int code) noexcept;

/// Prints the error with this rank's number and host, and ends the job with the error's code.
[[noreturn]] void give_up(const Communicator& communicator, const Error& error) noexcept;

}  // namespace muster::detail::comm
