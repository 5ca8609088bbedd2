// How one rank's error reaches all ranks. The rank raises an alarm. The waits of the other ranks see it and throw
// RemoteError. Then all ranks call agree() and learn what happened on each of them.
//
//   Outcome mine;
//   try { attempt(); } catch (...) { mine = current_outcome(); raise_alarm(world, mine); }
//   auto outcomes = agree(world, mine, timeout);         // collective over the world; the alarm is cleared
//
// A failed attempt may leave collectives half done. The communicators that it used must not be used again, except the
// world itself, which agree() renews.
#pragma once

#include "base/export.hpp"
#include "comm/outcome.hpp"
#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <vector>

namespace muster::detail::comm {

/// Like current_outcome(), for work in which ranks also wait for each other by other means than communicators, such as
/// gloo. If another rank has raised an alarm, this rank's error, such as a closed connection, counts as its consequence
/// and becomes `interrupted`, unless both errors are the same. If this rank has raised an alarm, returns the outcome
/// that it raised, whatever came later, so that a cause remains if several ranks fail at once.
MUSTER_INTERNAL_API Outcome current_outcome(const Communicator& world);

/// If this rank has failed, tells all other ranks of the world, whose waits throw RemoteError from then on. Returns at
/// once. Does nothing in a second call before agree(), in a child of fork(), and for an error on which an outer attempt
/// has agreed.
MUSTER_INTERNAL_API void raise_alarm(const Communicator& communicator, const Outcome& mine);

/// Throws RemoteError if another rank of the world has raised an alarm, as every wait on a communicator does.
void throw_if_alarm_raised(const Communicator& communicator);

/// For a separate world, which one thread of this rank uses. Another thread calls this to give up that thread's work:
/// the thread's waits on the world throw at once, and so do its later calls. Local.
void give_up_work(const Communicator& world) noexcept;
/// Call it when the thread of give_up_work() has had its time to end: that thread's calls on the world never return
/// from now on, so that MPI may end without it. Local.
void leave_thread_behind(const Communicator& world) noexcept;
/// The thread of give_up_work() calls this before it uses or frees objects that may end with the process; the call
/// never returns if the thread is left behind. Local.
void stay_if_left_behind(const Communicator& world);

/// The error that some ranks did not come to agree(): they are stuck or lost, and the job has to end.
class RanksMissing : public Error {
 public:
  RanksMissing(const Error& error, std::chrono::milliseconds report_delay)
      : Error(error), report_delay_(report_delay) {}

  /// How long this rank waits before it reports the error. The rank that reports first ends the job, so only one rank
  /// reports.
  std::chrono::milliseconds report_delay() const noexcept { return report_delay_; }

 private:
  std::chrono::milliseconds report_delay_;
};

/// While it lives, this rank's calls of agree() on the world belong to an attempt nested in the current one.
class NestedAttempt {
 public:
  explicit NestedAttempt(const Communicator& world);
  NestedAttempt(const NestedAttempt&) = delete;
  NestedAttempt& operator=(const NestedAttempt&) = delete;
  ~NestedAttempt();

 private:
  int& depth_;
};

/// Waits for all ranks and returns the outcome of each. Collective over the world.
///
/// Ranks may come from attempts at different depths, for example if one has thrown between two nested attempts. Then
/// the agreement belongs to the outermost attempt. A rank in a deeper one gets the root cause thrown, here and by its
/// later calls on the world's communicators, until its agree() at the outermost depth returns these same outcomes. If
/// all ranks are done, the different depths are the error.
///
/// Throws RanksMissing (ExitCode::retry), which names the missing ranks, past `timeout` and the time that ranks have
/// announced by keep_alive(), or past stall_grace after some rank has given up waiting.
std::vector<Outcome> agree(const Communicator& communicator, const Outcome& mine, std::chrono::milliseconds timeout);

}  // namespace muster::detail::comm
