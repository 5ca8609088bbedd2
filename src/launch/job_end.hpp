// When the batch job ends in which this process runs, and with it the launch. Slurm tells it in a variable since
// version 22.05; other batch systems, and an older Slurm, are asked by their own programs.
#pragma once

#include "base/export.hpp"
#include "launch/launcher.hpp"
#include "muster/launch.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::launch {

using JobEndTime = std::optional<std::chrono::system_clock::time_point>;

/// The end by SLURM_JOB_END_TIME, or else by MUSTER_JOB_END_TIME: seconds since 1970. None if it is in the past, which
/// happens in a shell of an earlier allocation, and for what is no number.
MUSTER_INTERNAL_API JobEndTime end_of_allocation(const Environment& environment,
                                                 std::chrono::system_clock::time_point now);
/// What is wrong with MUSTER_JOB_END_TIME, which a user has set: a warning if it is in the past, an Error
/// (ExitCode::usage) if it is no number of seconds; otherwise empty.
MUSTER_INTERNAL_API std::string job_end_warning(const Environment& environment,
                                                std::chrono::system_clock::time_point now);

/// What a batch system is asked with: the program and its arguments. Empty if this is no job of a known system.
std::vector<std::string> job_end_question(const Environment& environment);

// Their answers. None for a text that tells no end: an error, or a job without a limit.

/// squeue -h -o %e: "2026-11-27T03:00:00", in local time.
JobEndTime end_in_squeue(const std::string& text);
/// qstat -f of PBS and Torque: when the job began, or how long it has run, and its limit.
JobEndTime end_in_qstat(const std::string& text, std::chrono::system_clock::time_point now);
/// bjobs -noheader -o time_left: "1:05 L", hours and minutes until the limit.
JobEndTime end_in_bjobs(const std::string& text, std::chrono::system_clock::time_point now);

/// The end as the batch system tells it, or why it is not known; `note` is empty where there is no job.
struct AskedJobEnd {
  JobEndTime end = {};
  std::string note = {};
};
/// Asks the batch system, for a few seconds at most.
MUSTER_INTERNAL_API AskedJobEnd ask_for_job_end(const Environment& environment);

/// When a launch has to end: by its time limit, or with the batch job.
class LaunchEnd {
 public:
  /// Asks the batch system, on the job's first process; `muster run` has asked already. Call it before MPI is
  /// initialised: afterwards no other program should be started, since some MPIs do not allow it.
  void ask();
  /// Collective.
  void choose(const Communicator& ranks, const LaunchFlags& flags);
  /// See Launch::time_left().
  std::optional<std::chrono::duration<double>> time_left() const noexcept;

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  AskedJobEnd asked_;  ///< on rank 0, where no variable tells the end of the job
  std::optional<std::chrono::steady_clock::time_point> end_;
};

}  // namespace muster::detail::launch
