// When the batch job of this process ends, and the launch with it. Slurm has a variable for this since version 22.05;
// for other batch systems, and an older Slurm, the launch runs the batch system's own program.
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

/// The time in SLURM_JOB_END_TIME, or else in MUSTER_JOB_END_TIME: seconds since 1970. A time in the past, as in a
/// shell of an earlier allocation, a time more than longest_time ahead, or a text that is no number counts as missing.
/// Empty if both are missing.
MUSTER_INTERNAL_API JobEndTime end_of_allocation(const Environment& environment,
                                                 std::chrono::system_clock::time_point now);
/// Checks MUSTER_JOB_END_TIME, which a user may set. Returns a warning if it is in the past, otherwise an empty text.
/// Throws an Error (ExitCode::usage) if it is no number of seconds.
MUSTER_INTERNAL_API std::string job_end_warning(const Environment& environment,
                                                std::chrono::system_clock::time_point now);

/// The command that asks the batch system for the end of the job: program and arguments. Empty if this is no job of a
/// known system.
std::vector<std::string> job_end_question(const Environment& environment);

// The following functions read the output of the commands of job_end_question(). Empty if it does not tell the end: it
// is an error message, or the job has no time limit.

/// squeue -h -o %e: "2026-11-27T03:00:00", in local time.
JobEndTime end_in_squeue(const std::string& text);
/// qstat -f of PBS and Torque: it has the time limit of the job, and when the job began or how long it has run.
JobEndTime end_in_qstat(const std::string& text, std::chrono::system_clock::time_point now);
/// bjobs -noheader -o time_left of LSF: "1:05 L", hours and minutes until the time limit.
JobEndTime end_in_bjobs(const std::string& text, std::chrono::system_clock::time_point now);

/// The end of the job that the batch system gave, or a note why the end is not known. Both are empty if there is no
/// job.
struct AskedJobEnd {
  JobEndTime end = {};
  std::string note = {};
};
/// Asks the batch system, for a few seconds at most.
MUSTER_INTERNAL_API AskedJobEnd ask_for_job_end(const Environment& environment);

/// When a launch has to end: by its time limit, or with the batch job.
class LaunchEnd {
 public:
  /// Asks the batch system if no variable has the end of the job: only on the job's first process, and not under
  /// `muster run`, which has asked already. Call it before MPI is initialised, because some MPIs do not allow a process
  /// to start programs afterwards.
  void ask();
  /// Sets the end: by the time limit if one is given, otherwise with the batch job. Collective.
  void choose(const Communicator& ranks, const LaunchFlags& flags);
  /// See Launch::time_left().
  std::optional<std::chrono::duration<double>> time_left() const noexcept;

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  AskedJobEnd asked_;  ///< the result of ask(), on the job's first process
  std::optional<std::chrono::steady_clock::time_point> end_;
};

}  // namespace muster::detail::launch
