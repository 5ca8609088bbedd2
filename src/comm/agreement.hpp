// How one rank's error reaches all ranks. The rank raises an alarm. Every wait of every other rank sees it and throws
// RemoteError. Then all ranks call agree() and learn what happened on each of them.
//
//   Outcome mine;
//   try { attempt(); } catch (...) { mine = current_outcome(); raise_alarm(world, mine); }
//   auto outcomes = agree(world, mine, limit);         // collective over the world; the alarm is cleared
//
// A failed attempt may leave collectives half done. The communicators that it used must not be used again, except the
// world itself, which agree() renews.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::comm {

struct World;

/// How an attempt ended on one rank.
struct Outcome {
  enum class Kind {
    done,
    failed,       ///< this rank caused the failure
    interrupted,  ///< this rank stopped because of another rank's alarm
  };
  Kind kind = Kind::done;
  ExitCode code = ExitCode::done;
  bool agreed = false;    ///< every rank has the same error
  std::string text = {};  ///< the error's text; for `done`, the rank's result
  bool stalled = false;   ///< this rank waited for longer than the launch's time limit: others may be stuck
};

/// Turns the exception that is being handled into this rank's outcome: `interrupted` for another rank's error,
/// otherwise `failed`. Cuts the backtrace off the text of torch's exceptions. Call it inside catch (...).
Outcome current_outcome();

/// Returns the outcome as bytes for another rank. The text is cut to at most `longest` characters, at the end of a
/// sentence or, if there is none, of a word.
std::string pack(const Outcome& outcome, std::size_t longest = std::string::npos);
Outcome unpack(std::string_view bytes);
constexpr std::size_t packed_fields = 3;  ///< bytes before the text

/// current_outcome() for work in which ranks also wait for each other outside of communicators. An error that only
/// follows from the one that another rank of the world has raised, such as a closed connection, becomes `interrupted`
/// too. A rank that has raised an alarm keeps that outcome, whatever it receives or throws later, so that a cause
/// remains if several ranks fail at once.
Outcome current_outcome(const Communicator& world);

/// Tells all other ranks of the world if this rank has failed; their waits throw RemoteError from then on. Returns at
/// once; a second call before agree() does nothing.
void raise_alarm(const Communicator& communicator, const Outcome& mine);

/// Throws RemoteError if another rank of the world has raised an alarm, as every wait on a communicator does.
void throw_if_alarm_raised(const Communicator& communicator);

/// A wait took longer than the launch's time limit.
class WaitTimeout : public Error {
 public:
  using Error::Error;
};

/// Some ranks did not come to agree(): they are stuck or lost, and the job has to end.
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

/// How long to wait for the other ranks once a rank has given up waiting. A rank that is not stuck answers at once.
constexpr std::chrono::milliseconds stall_grace{1000};

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

/// Throws the root cause that an outer attempt has agreed on (World::outer) as RemoteError. This rank has yet to return
/// to that attempt.
[[noreturn]] void throw_outer_cause(const World& world);

/// Waits for all ranks and returns the outcome of each. Collective over the world.
///
/// Ranks may come from attempts at different depths, for example if one has thrown between two nested attempts. Then
/// the agreement belongs to the outermost attempt. A rank in a deeper one gets the root cause thrown, here and from
/// every later call, until its agree() at the outermost depth returns these same outcomes. If no rank has failed, the
/// different depths are the error.
///
/// Throws RanksMissing (ExitCode::retry), which names the missing ranks, past `limit` and the time that ranks have
/// announced by keep_alive(), or past stall_grace after some rank has given up waiting.
std::vector<Outcome> agree(const Communicator& world, const Outcome& mine, std::chrono::milliseconds limit);

/// Returns the error that caused the failure; none if all ranks are done. Its text begins with the rank and host unless
/// all ranks have the same error. If ranks have left and none has failed, it is the error that the lowest of them
/// received.
std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts);

}  // namespace muster::detail::comm
