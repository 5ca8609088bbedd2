// Interprets the end of a start and decides what comes next. All functions are pure.
#pragma once

#include "muster/error.hpp"
#include "run/failures.hpp"
#include "supervise/launcher_output.hpp"

#include <chrono>
#include <string>
#include <vector>

namespace muster::detail::supervise {

/// How one start of the job has ended. The job, here: the launcher and its ranks.
struct JobEnd {
  int code = 0;  ///< the launcher's exit code, or a rank's that watch() knows; 0 if a signal has ended the launcher
  int launcher_signal = 0;  ///< the signal that has ended the launcher; 0 if none has
  LauncherReport report = {};
  bool exceeded_grace = false;  ///< the job has not stopped within the grace time after a request, and was killed
  bool not_up = false;          ///< the ranks have not come together within their time limit, and were killed
  bool stop_requested = false;  ///< a request to stop came while the job ran
  bool had_ranks = false;       ///< the launcher has started processes on this host
  std::vector<std::string> programs = {};  ///< the program of each rank, if the job has several
  bool grows = false;                      ///< the ranks were asked to stop so that more ranks can be started
  /// The loss of report.lost_host is no failure of the program: the job goes on without the host, or waits for it.
  bool host_is_excused = false;
};

/// What holds for all starts of the job.
struct JobRequirements {
  int ranks = 1;
  int min_workers = 1;  ///< least number of ranks; equals `ranks` if all are required
  int max_failures = 0;
  int max_preemptions = -1;
  /// True if the saved state requires exactly `ranks` ranks, so that the job waits for them.
  bool waits_for_ranks = false;
};

struct NextStart {
  bool again = false;
  int code = 0;                    ///< the job's exit code, if it is not started again
  std::chrono::seconds wait = {};  ///< how long to wait before the next start
  int ranks = 0;                   ///< number of ranks of the next start
};

/// Returns the job's exit code. It is 0 if Launch::run() had returned 0 on the ranks, whatever happened afterwards, and
/// ExitCode::usage if the system cannot execute the program. If a rank was lost, the job was killed, or ranks were not
/// started, it is the code that Launch::run() had returned, or ExitCode::retry if it had not returned. Otherwise it is
/// the launcher's code.
int exit_code_of(const JobEnd& end);

/// True if a rank has loaded muster's library. The ranks' messages say so; if their stderr goes elsewhere, the exit
/// code of a stopped job says so, too.
bool has_started(const JobEnd& end);

/// True if a request to stop has ended a rank that had no Launch, which would have handled the signal; this is no
/// failure. Some launchers report the signal only by their exit code: 128 + signal, as shells do.
bool was_stopped_early(const JobEnd& end);

/// True if the launcher has ended with 0 before the ranks of a run had finished their work, as mpirun of Open MPI 5 may
/// do when it loses a host. (Ranks that own MPI always report that they have finished.)
bool is_unfinished(const JobEnd& end);

/// Returns how many times all hosts of the job are asked, once a second, whether they answer: not at all if no failure
/// needs a cause, once if the failure is explained, otherwise several times. The launcher may report a lost rank
/// shortly before its host is gone, or a rank that MPI has ended since a connection was closed; Hydra reports no lost
/// hosts.
int times_to_ask_hosts(const JobEnd& end, bool stop_requested);

/// Decides what comes next. `failures`: the preemptions or the other failures so far, with this end if it is one of
/// these. `ranks`: number of ranks of this start. If the launcher has no room for that many, the next start has half of
/// them; after a start that could run, the next one has all of them again. If the saved state requires another number
/// of ranks and the job may have that many, it is started with that number at once.
NextStart decide(const JobEnd& end, const run::Failures& failures, const JobRequirements& requirements, int ranks,
                 bool stop_requested);

/// True if the failure is not the program's fault: a host was lost and is excused (JobEnd::host_is_excused); or ranks
/// whose run had begun lost their node, were ended by SIGTERM or preempted by the scheduler; or Slurm's controller did
/// not answer.
bool is_preemption(const JobEnd& end);

/// True if the end counts as a failure. A stop does not, however it was requested, nor does an error that another start
/// cannot fix.
bool is_failure(const JobEnd& end, bool stop_requested);

/// Returns the root cause, as far as the launcher and the ranks have reported it, for example "rank 1 (n2) was ended by
/// signal 9 (Killed)". `in_file`: the contents of the ranks' error.txt, or empty.
std::string cause_of(const JobEnd& end, const std::string& in_file);

/// Returns where to read more: "The log of rank 1 is RUN/logs/rank_00001.log"; empty if no run is known.
std::string log_hint(const JobEnd& end);

}  // namespace muster::detail::supervise
