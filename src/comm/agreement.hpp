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
};

/// What the exception that is being handled means for this rank: `left` for another rank's error, else `failed`. Of the
/// text of torch's exceptions the backtrace is left out. To be called in a catch (...).
Outcome caught();

/// The bytes that tell it to another rank; of its text the first `longest` characters.
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

/// Some ranks did not come to agree(): they are stuck or lost, and all that is left is to end the job.
class Lost : public Error {
 public:
  Lost(const Error& error, std::vector<int> ranks) : Error(error), ranks_(std::move(ranks)) {}

  /// Those of the world.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

/// The outcome of every rank. Past the limit Lost (ExitCode::retry) names the ranks that did not come.
std::vector<Outcome> agree(const Communicator& world, const Outcome& mine, std::chrono::milliseconds limit);

/// What all ranks say of it: the root cause, none if all are done. An error that not all ranks have is put with its
/// rank and host. Where ranks have left and none has failed, it is the error that the lowest of them heard.
std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts);

}  // namespace muster::detail::comm
