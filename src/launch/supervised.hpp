// What a rank knows of the `muster run` that has started it, and what it tells it.
//
// `muster run` reads the stderr of the job, wherever its ranks run. A line that begins with `telling` is for it alone,
// and it keeps errors ("muster: error: …") for its own report of the cause.
#pragma once

#include "base/telling.hpp"

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace muster::detail::launch {

struct Supervisor {
  std::string id;                   ///< of one `muster run`, the same over all its restarts
  std::string started;              ///< when that was, as part of a run's name
  std::optional<int> max_failures;  ///< --max-failures
  int full_workers = 0;             ///< ranks of the job when none is missing; 0 without --min-workers
  std::optional<std::chrono::system_clock::time_point> begin = {};  ///< of its first start
};

/// From the environment (`variables` of it); none where nobody supervises this process.
std::optional<Supervisor> supervisor();

/// In the environment of a supervised rank.
namespace variable {
inline constexpr const char* supervised = supervised_variable;  // 1
inline constexpr const char* id = "MUSTER_SUPERVISOR";
inline constexpr const char* started = "MUSTER_STARTED";
inline constexpr const char* begin = "MUSTER_BEGIN";  // seconds since 1970
inline constexpr const char* max_failures = "MUSTER_MAX_FAILURES";
inline constexpr const char* full_workers = "MUSTER_FULL_WORKERS";
}  // namespace variable

using detail::telling;
inline constexpr std::string_view telling_starting = "starting";  ///< this rank initialises MPI
inline constexpr std::string_view telling_up = "up";              ///< MPI is there: the ranks have come together
inline constexpr std::string_view telling_run = "run";            ///< the folder of the run that begins
inline constexpr std::string_view telling_least = "least";        ///< the workers that are enough
inline constexpr std::string_view telling_needed =
    "needed";  ///< the ranks that the saved state takes, no fewer and no more
inline constexpr std::string_view telling_stopped = "stopped";  ///< on request, and there was no state to save
inline constexpr std::string_view telling_cause = "cause";      ///< error.txt in the run's folder is of this start
inline constexpr std::string_view telling_ended = "ended";      ///< the exit code: every rank is through its work

/// Nothing where nobody supervises.
void tell_supervisor(std::string_view what, std::string_view text) noexcept;

/// While it lives, nobody supervises this process, as far as it knows: in a trial, for which its sweep answers. One at
/// a time.
class Unsupervised {
 public:
  Unsupervised() noexcept;
  Unsupervised(const Unsupervised&) = delete;
  Unsupervised& operator=(const Unsupervised&) = delete;
  ~Unsupervised();
  /// Whether a supervisor would have been told so.
  bool stopped_without_state() const noexcept { return stopped_without_state_; }

 private:
  friend void tell_supervisor(std::string_view what, std::string_view text) noexcept;
  bool stopped_without_state_ = false;
};

/// The parent of a process, 0 if /proc does not show it.
pid_t parent_of(pid_t process);

/// From now on this process is killed when its launcher ends, in whatever way; that ends with `muster run`.
void end_with_launcher() noexcept;

}  // namespace muster::detail::launch
