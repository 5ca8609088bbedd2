// How an attempt ended on a rank, and the error that follows from the outcomes of all ranks.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::comm {

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
  bool stalled = false;   ///< this rank's wait passed the launch's timeout: other ranks may be stuck
};

/// A wait took longer than the launch's timeout.
class WaitTimeout : public Error {
 public:
  using Error::Error;
};

/// How long to wait for the other ranks once a rank has given up waiting. A rank that is not stuck answers at once.
constexpr std::chrono::milliseconds stall_grace{1000};

/// Turns the exception that is being handled into this rank's outcome: `interrupted` for another rank's error,
/// otherwise `failed`. Cuts the backtrace off the text of torch's exceptions. Call it inside catch (...).
MUSTER_INTERNAL_API Outcome current_outcome();

/// Returns the outcome as bytes for another rank. The text is cut to at most `longest` bytes, at the end of a sentence
/// or, if there is none, of a word.
std::string pack(const Outcome& outcome, std::size_t longest = std::string::npos);
Outcome unpack(std::string_view bytes);
constexpr std::size_t packed_fields = 3;  ///< bytes before the text

/// Returns the error that caused the failure; none if all ranks are done. Its text begins with the rank and host unless
/// all ranks have the same error. If no rank has failed and some were interrupted, it is the error that the lowest
/// interrupted rank received.
std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts);

/// The root cause as the RemoteError of the rank that has caused it. At least one rank must not be done.
RemoteError remote_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts);

}  // namespace muster::detail::comm
