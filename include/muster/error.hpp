// Errors: what was being done, the fact, the remedy, and the exit code of the process.
#pragma once

#include <muster/detail/export.hpp>

#include <stdexcept>
#include <string>
#include <string_view>

namespace muster {

/// How a process ends. Launch::run turns an Error into its code, any other exception into `user_error`.
enum class ExitCode : int {
  done = 0,
  user_error = 1,        ///< an exception of the user's own code, or a mistake in it that muster has detected
  usage = 64,            ///< wrong flags, options or calls; a run whose name or directory cannot be used
  data = 65,             ///< bad data, configuration file, checkpoint or model; no GPU although one is wanted
  missing_package = 69,  ///< a program or library is missing here, or was when muster was built
  retry = 75,            ///< a lost rank, a timeout, a disk that is full or not writable: trying again may help
  stopped = 85,          ///< stopped on request, state saved
  interrupted = 130,     ///< Ctrl-C
};

/// True if a job that ends with this code may succeed when it is started again. Then `muster run` starts it again, and
/// a trainer with FailureConfig::max_failures makes another attempt. True for codes that are not muster's own.
constexpr bool is_worth_retrying(ExitCode code) noexcept {
  switch (code) {
    case ExitCode::done:
    case ExitCode::usage:
    case ExitCode::data:
    case ExitCode::missing_package:
    case ExitCode::stopped:
    case ExitCode::interrupted:
      return false;
    default:
      return true;
  }
}

/// An error that muster has detected. what() reads "DOING: FACT. REMEDY".
class MUSTER_API Error : public std::runtime_error {
 public:
  /// `doing` as in "opening train.h5", `fact` as in "there is no such file", `remedy` as a sentence without its full
  /// stop; an empty remedy is left out.
  Error(ExitCode code, std::string_view doing, std::string_view fact, std::string_view remedy = {});

  /// An error on which the ranks have agreed. `text` is the whole text, the same on all ranks.
  Error(ExitCode code, const std::string& text) : std::runtime_error(text), code_(code), agreed_(true) {}

  ExitCode code() const noexcept { return code_; }
  /// True if every rank has this same error, and for a RemoteError. False: only this rank has the error.
  bool agreed() const noexcept { return agreed_; }

 private:
  ExitCode code_;
  bool agreed_ = false;
};

/// An error of another rank, thrown here so that this rank ends its work too. what() names rank and host.
class MUSTER_API RemoteError : public Error {
 public:
  RemoteError(ExitCode code, int rank, const std::string& text) : Error(code, text), rank_(rank) {}

  /// The rank on which the error happened, as the launch or the DataParallel numbers it.
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

}  // namespace muster
