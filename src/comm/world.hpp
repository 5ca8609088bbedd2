// The life of MPI in this process, and the world: the ranks that it starts, and how long they wait for each other.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::comm {

/// Initialises MPI (THREAD_MULTIPLE) unless somebody has, and finalises it only if it did. One per process.
class MpiScope {
 public:
  MpiScope();
  MpiScope(const MpiScope&) = delete;
  MpiScope& operator=(const MpiScope&) = delete;
  ~MpiScope();

  /// All ranks of MPI_COMM_WORLD, over a channel of its own.
  const Communicator& world() const noexcept { return *world_; }
  /// True if MPI was initialised here, so that it ends with this object.
  bool owns_mpi() const noexcept { return initialised_here_; }
  /// Waits until all ranks have called it, for as long as that takes. Collective.
  void wait_for_all() const noexcept;

 private:
  bool initialised_here_ = false;
  std::optional<Communicator> world_;
};

/// The nodes of all ranks of a world. A launch's is the one that MPI finds; tests make one up.
struct Placement {
  std::vector<int> node_of_rank;   ///< [rank]: any number, equal where ranks share memory
  std::vector<std::string> hosts;  ///< [rank]: the name of its host
};

/// An Error (ExitCode::usage), which begins with `doing`, unless MPI is alive and this thread may call it. Local.
void require_mpi(const char* doing);

/// Whether MPI may be called by several threads at once (MPI_THREAD_MULTIPLE).
bool threads_may_call_mpi() noexcept;

/// A world of the same ranks that are where `placement` says; that of a launch is where MPI says (muster/mpi.hpp). Only
/// ranks that do share memory may be on one node; ranks of different nodes talk by MPI, even where they could share
/// memory. Collective.
Communicator make_world(const Communicator& ranks, Placement placement);

/// The same ranks as a world of their own, with the limit of this one, for another thread of each or for work that may
/// fail alone: the alarms of either are not heard in the other. Collective.
Communicator make_world_apart(const Communicator& ranks);

/// The limit of every wait on communicators of this world, from now on.
void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit);
std::chrono::milliseconds time_limit(const Communicator& communicator);

/// How long the other ranks of this world may take to hear of a failure after which nothing is tried again: 30 s, so
/// that a job that has failed ends soon, unless there is other work in it that would end too.
void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace);
std::chrono::milliseconds final_grace(const Communicator& communicator);

/// Sets the limit while it lives.
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

/// Ends all processes of MPI_COMM_WORLD with that code: the last resort.
[[noreturn]] void abort(int code) noexcept;

/// Says why on the screen, as this rank of the world, and ends the job with the error's code.
[[noreturn]] void give_up(const Communicator& communicator, const Error& error) noexcept;

}  // namespace muster::detail::comm
