// How a rank communicates with the `muster run` that has started it: it reads environment variables and writes lines to
// stderr.
//
// `muster run` reads the stderr of the job, wherever its ranks run. It does not show lines that begin with
// `message_prefix`, and it collects errors ("muster: error: …") for its report of the cause.
#pragma once

#include "base/export.hpp"
#include "base/supervisor_message.hpp"

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace muster::detail::launch {

struct Supervisor {
  std::string id;                                 ///< of the `muster run`, the same over all its restarts
  std::string started;                            ///< when the `muster run` began, as part of a run's name
  std::optional<int> max_failures;                ///< --max-failures
  int full_worker_count = 0;                      ///< ranks of the job when none is missing; 0 without --min-workers
  std::optional<std::chrono::seconds> used = {};  ///< from its first start to this one: the hosts' clocks may differ
};

/// Reads the supervisor's settings from the environment; none if this process is not supervised.
MUSTER_INTERNAL_API std::optional<Supervisor> supervisor();

/// Environment variables of a supervised rank.
namespace variable {
inline constexpr const char* supervised = supervised_variable;  // 1
inline constexpr const char* id = "MUSTER_SUPERVISOR";
inline constexpr const char* started = "MUSTER_STARTED";
inline constexpr const char* used = "MUSTER_USED_SECONDS";     // since the first start
inline constexpr const char* job_end = "MUSTER_JOB_END_TIME";  // seconds since 1970, as SLURM_JOB_END_TIME
inline constexpr const char* max_failures = "MUSTER_MAX_FAILURES";
inline constexpr const char* full_worker_count = "MUSTER_FULL_WORKERS";
}  // namespace variable

using detail::message_prefix;
/// Text: "RANK PID HOST", where the launcher names a lost rank by its process id.
inline constexpr std::string_view message_process = "process";
inline constexpr std::string_view message_up = "up";              ///< MPI is there: the ranks have come together
inline constexpr std::string_view message_run = "run";            ///< the folder of the run that begins
inline constexpr std::string_view message_min_workers = "least";  ///< the workers that are enough
inline constexpr std::string_view message_ranks_needed =
    "needed";  ///< the ranks that the saved state takes, no fewer and no more
inline constexpr std::string_view message_stopped = "stopped";    ///< on request, and there was no state to save
inline constexpr std::string_view message_cause = "cause";        ///< error.txt in the run's folder is of this start
inline constexpr std::string_view message_returned = "returned";  ///< text: the exit code that Launch::run() returns
inline constexpr std::string_view message_ended = "ended";        ///< every rank is through what came after it

/// Writes a line to the supervisor. Does nothing if this process is not supervised.
MUSTER_INTERNAL_API void tell_supervisor(std::string_view what, std::string_view text) noexcept;

/// While it lives, this process acts as if it were not supervised: for a trial, which its sweep supervises. At most one
/// exists at a time.
class MUSTER_INTERNAL_API UnsupervisedScope {
 public:
  UnsupervisedScope() noexcept;
  UnsupervisedScope(const UnsupervisedScope&) = delete;
  UnsupervisedScope& operator=(const UnsupervisedScope&) = delete;
  ~UnsupervisedScope();
  /// True if the trial would have told a supervisor message_stopped.
  bool stopped_without_state() const noexcept { return stopped_without_state_; }

 private:
  friend void tell_supervisor(std::string_view what, std::string_view text) noexcept;
  bool stopped_without_state_ = false;
};

/// The parent of a process; 0 if /proc does not show it.
MUSTER_INTERNAL_API pid_t parent_of(pid_t process);

/// Makes this process be killed when its launcher ends, for whatever reason. The launcher itself ends with
/// `muster run`.
void end_with_launcher() noexcept;

}  // namespace muster::detail::launch
