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

/// What a rank knows about the `muster run` that supervises it.
struct Supervisor {
  std::string id;                   ///< identifies the `muster run`; the same in all its starts
  std::string started;              ///< when the `muster run` began, as part of a run's name
  std::optional<int> max_failures;  ///< --max-failures
  int full_worker_count = 0;        ///< ranks of the job when none is missing; 0 without --min-workers
  /// The time from the first start to this one. Not the time of day of the first start: the clocks of hosts may differ.
  std::optional<std::chrono::seconds> used = {};
};

/// Reads the supervisor's settings from the environment; none if this process is not supervised.
MUSTER_INTERNAL_API std::optional<Supervisor> supervisor();

/// Environment variables of a supervised rank.
namespace variable {
inline constexpr const char* supervised = supervised_variable;  // set to 1
inline constexpr const char* id = "MUSTER_SUPERVISOR";
inline constexpr const char* started = "MUSTER_STARTED";
inline constexpr const char* used = "MUSTER_USED_SECONDS";     // from the first start to this one
inline constexpr const char* job_end = "MUSTER_JOB_END_TIME";  // seconds since 1970, as SLURM_JOB_END_TIME
inline constexpr const char* max_failures = "MUSTER_MAX_FAILURES";
inline constexpr const char* full_worker_count = "MUSTER_FULL_WORKERS";
}  // namespace variable

using detail::message_prefix;
/// "RANK PID HOST"; only if the launcher reports a lost rank by its process id.
inline constexpr std::string_view message_process = "process";
inline constexpr std::string_view message_up = "up";              ///< MPI is initialised; the text: the number of ranks
inline constexpr std::string_view message_run = "run";            ///< the folder of the run that begins
inline constexpr std::string_view message_min_workers = "least";  ///< the least number of workers that train
inline constexpr std::string_view message_ranks_needed =
    "needed";  ///< the only number of ranks on which the saved state can be restored
inline constexpr std::string_view message_stopped = "stopped";    ///< stopped on request; there was no state to save
inline constexpr std::string_view message_cause = "cause";        ///< this start has written the run's error.txt
inline constexpr std::string_view message_returned = "returned";  ///< the exit code that Launch::run() returns
inline constexpr std::string_view message_ended = "ended";        ///< all ranks are done; MPI_Finalize comes next

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
  /// True if the trial has stopped on request and had no state to save: it has called tell_supervisor(message_stopped).
  bool stopped_without_state() const noexcept { return stopped_without_state_; }

 private:
  friend void tell_supervisor(std::string_view what, std::string_view text) noexcept;
  bool stopped_without_state_ = false;
};

/// The parent of a process; 0 if /proc does not have it.
MUSTER_INTERNAL_API pid_t parent_of(pid_t process);

/// Makes this process be killed when its launcher, or a script between the two, ends for whatever reason. If the kernel
/// has no pidfd_open(), only the end of the parent process counts. The launcher itself ends with `muster run`.
void end_with_launcher() noexcept;

}  // namespace muster::detail::launch
