// Interprets the end of a start and decides what comes next: pure functions.
#pragma once

#include "muster/error.hpp"
#include "run/failures.hpp"
#include "supervise/launcher_output.hpp"

#include <chrono>
#include <string>

namespace muster::detail::supervise {

/// How one start of the job has ended.
struct JobEnd {
  int code = 0;             ///< the launcher's exit code
  int launcher_signal = 0;  ///< or the signal that ended it
  LauncherReport report = {};
  bool exceeded_grace = false;  ///< it did not heed the wish to stop, and was ended
  bool not_up = false;          ///< its ranks did not come together within the time for that, and it was ended
  bool stop_requested = false;  ///< while it ran
  bool had_ranks = false;       ///< the launcher has started processes on this host
  bool grows = false;           ///< the ranks were asked to stop since there is room for more of them
  /// The job goes on without the host that was lost, or waits for it: then that is no failure of the program.
  bool host_is_excused = false;
};

/// The requirements on all starts.
struct JobRequirements {
  int ranks = 1;
  int min_workers = 1;  ///< equals `ranks` if all are required
  int max_failures = 0;
  int max_preemptions = -1;
  bool waits_for_ranks = false;  ///< for all of them, as the saved state requires
};

struct NextStart {
  bool again = false;
  int code = 0;                    ///< the exit code, if the job is not started again
  std::chrono::seconds wait = {};  ///< the time before the next start
  int ranks = 0;                   ///< the number of ranks of the next start
};

/// The job's exit code. If Launch::run() had returned 0, it is 0, whatever happened afterwards to the ranks or to the
/// launcher; another code that it had returned holds where a rank was lost. Otherwise that is ExitCode::retry.
int exit_code_of(const JobEnd& end);

/// True if a rank has loaded muster's library. Where their messages do not reach us, since their stderr goes elsewhere,
/// the exit code of a stop shows it.
bool has_started(const JobEnd& end);

/// True if a request to stop has ended a rank that had no Launch, which handles the signal: that is no failure. Some
/// launchers report the signal only by an exit code like a shell's.
bool was_stopped_early(const JobEnd& end);

/// True if the launcher has ended with 0 before the ranks of a run were through their work, as mpirun of Open MPI 5 may
/// when it loses a host. Ranks that own MPI always tell that they are through.
bool is_unfinished(const JobEnd& end);

/// How often all hosts of the job are asked, once a second, whether they answer: the launcher may report a lost rank
/// shortly before its host is gone, and Hydra says nothing about a lost host.
int times_to_ask_hosts(const JobEnd& end, bool stop_requested);

/// Decides what follows. `failures`: the preemptions or the other failures, including this end if it is one. `ranks`:
/// of this start. If the launcher has no room for that many, the next start has half of them, and after a start that
/// ran all of them again. If the saved state requires another number of ranks, and the job may have that many, it is
/// started at once with that number.
NextStart decide(const JobEnd& end, const run::Failures& failures, const JobRequirements& requirements, int ranks,
                 bool stop_requested);

/// True if the failure is not the program's fault: a host could not be reached and there are enough others, or ranks
/// whose run had begun lost their node, or were ended by SIGTERM or preempted by the scheduler, or Slurm's controller
/// did not answer.
bool is_preemption(const JobEnd& end);

/// True if the end is a failure that counts: not a stop, however it was requested, and not an error that a new start
/// cannot fix.
bool is_failure(const JobEnd& end, bool stop_requested);

/// The root cause, as far as the launcher and the ranks have reported it. `in_file`: the contents of the ranks'
/// error.txt, or empty. Example: "rank 1 (n2) was ended by signal 9 (Killed)".
std::string cause_of(const JobEnd& end, const std::string& in_file);

/// Where to read more: "The log of rank 1 is RUN/logs/rank_00001.log"; empty if no run is known.
std::string log_hint(const JobEnd& end);

}  // namespace muster::detail::supervise
