// How one rank's error surfaces on all: the rank raises an alarm, which every wait of every other rank sees and throws
// as RemoteError; then all ranks meet in agree() and know what happened to each.
//
//   Outcome mine;
//   try { attempt(); } catch (...) { mine = caught(); raise_alarm(world, mine); }
//   auto outcomes = agree(world, mine, limit);         // collective over the world; the alarm is silent again
//
// After an attempt that failed, collectives may have been left half done: communicators that were used in it must not
// be used again, except the world itself, which agree() makes anew.
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
    failed,  ///< the cause is here
    left,    ///< it left because of another rank's alarm
  };
  Kind kind = Kind::done;
  ExitCode code = ExitCode::done;
  bool agreed = false;    ///< every rank has the same error
  std::string text = {};  ///< of the error, or what a rank that is done has to say
  bool stalled = false;   ///< it has waited for longer than the limit of the launch: others may be stuck
};

/// What the exception that is being handled means for this rank: `left` for another rank's error, else `failed`. Of the
/// text of torch's exceptions the backtrace is left out. To be called in a catch (...).
Outcome caught();

/// The bytes that tell it to another rank; of its text at most `longest` characters, cut at the end of a sentence or,
/// if there is none, of a word.
std::string pack(const Outcome& outcome, std::size_t longest = std::string::npos);
Outcome unpack(std::string_view bytes);
constexpr std::size_t packed_fields = 3;  ///< bytes before the text

/// caught() where the ranks also wait for each other by other means than a communicator: an error that follows upon the
/// one that another rank of the world has raised, such as a connection that this rank closed, is `left` too. A rank
/// that has raised an alarm stays the cause that it was, whatever it hears or throws later: of several that fail at
/// once, one remains.
Outcome caught(const Communicator& world);

/// Tells all other ranks of the world that this one has failed, if it has; their waits throw RemoteError from then on.
/// Returns at once; the second call before agree() does nothing.
void raise_alarm(const Communicator& communicator, const Outcome& mine);

/// Throws another rank's error, if one of the world has told it (RemoteError), as every wait of a communicator does.
void hear_alarm(const Communicator& communicator);

/// A wait has gone beyond the limit of the launch.
class Stalled : public Error {
 public:
  using Error::Error;
};

/// Some ranks did not come to agree(): they are stuck or lost, and all that is left is to end the job.
class Lost : public Error {
 public:
  Lost(const Error& error, std::chrono::milliseconds turn) : Error(error), turn_(turn) {}

  /// Of those who know of it one speaks: the others wait for so long before they do, and are ended meanwhile.
  std::chrono::milliseconds turn() const noexcept { return turn_; }

 private:
  std::chrono::milliseconds turn_;
};

/// How long the others may take to hear that a rank has given up waiting: who is not stuck hears it at once.
constexpr std::chrono::milliseconds stall_grace{1000};

/// While it lives, this rank's agreements on the world are those of an attempt within what was attempted before.
class Nested {
 public:
  explicit Nested(const Communicator& world);
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
  ~Nested();

 private:
  int& depth_;
};

/// Throws what ranks have agreed on, as another rank's error, where this one has yet to leave for that attempt.
[[noreturn]] void leave(const World& world);

/// The outcome of every rank. Where some are in attempts around that of others, as one that has thrown between two
/// calls, it is the agreement of the outermost: from within another the root cause is thrown, as it is from every call
/// until then, and the next agreement is this one. Where none has failed, that they are in different calls is the
/// cause. Past the limit, and what ranks have announced beyond it, Lost (ExitCode::retry) names the ranks that did not
/// come; past stall_grace where some rank is heard to have given up waiting.
std::vector<Outcome> agree(const Communicator& world, const Outcome& mine, std::chrono::milliseconds limit);

/// What all ranks say of it: the root cause, none if all are done. An error that not all ranks have is put with its
/// rank and host. Where ranks have left and none has failed, it is the error that the lowest of them heard.
std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts);

}  // namespace muster::detail::comm
