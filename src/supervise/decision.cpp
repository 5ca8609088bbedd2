#include "supervise/decision.hpp"

#include "base/log.hpp"

#include <algorithm>
#include <csignal>
#include <cstring>

namespace muster::detail::supervise {
namespace {

std::string signal_text(int signal) {
  return str("signal ", signal, " (", ::strsignal(signal), ")",
             signal == SIGKILL   ? ", as the kernel does when memory runs out"
             : signal == SIGUSR1 ? ", the request to stop, which the program does not handle (yet)"
                                 : "");
}

/// True if a rank was lost. Some launchers report this only by their exit code: 128 + signal, as shells do.
bool lost_a_rank(const JobEnd& end) {
  const bool as_in_shells = end.code > 128 && end.code < 160 && end.code != static_cast<int>(ExitCode::interrupted);
  return end.report.lost_rank.has_value() || end.launcher_signal != 0 || as_in_shells;
}

/// True if the launcher could not start the ranks, or lost some. Its exit code does not always show this: srun may end
/// with 0 if it could not start a rank and Slurm has ended the others.
bool launcher_has_failed(const JobEnd& end) {
  const auto& report = end.report;
  // srun has failed before it has started a rank, for example because it does not find Slurm.
  const bool no_slurm = !report.loaded && !report.failed_rank && report.slurm.starts_with("srun: fatal: ");
  if (end.code != 0) return !report.launcher_error.empty() || no_slurm;
  return (!report.launcher_error.empty() && (report.failed_rank || report.lost_host)) ||
         (report.step_cancelled && !end.stop_requested);
}

bool ended_by_sigterm(const JobEnd& end) {
  return (end.report.lost_rank && end.report.lost_rank->signal == SIGTERM) || end.launcher_signal == SIGTERM;
}

/// Returns ", ./heat", which is added to a rank's place; empty if all ranks have the same program.
std::string program_of(const JobEnd& end, int rank) {
  const auto at = static_cast<std::size_t>(rank);
  return rank < 0 || at >= end.programs.size() ? "" : ", " + end.programs[at];
}

}  // namespace

int exit_code_of(const JobEnd& end) {
  if (end.report.no_program) return static_cast<int>(ExitCode::usage);
  if (end.report.returned_code == 0) return 0;
  // If mpirun is told to stop before its ranks have started, it may end with 0.
  const bool no_ranks = launcher_has_failed(end) || (end.stop_requested && !has_started(end));
  const bool broken_off = lost_a_rank(end) || end.exceeded_grace || end.not_up || no_ranks;
  if (!broken_off) return end.code;
  return end.report.returned_code.value_or(static_cast<int>(ExitCode::retry));
}

bool has_started(const JobEnd& end) { return end.report.loaded || end.code == static_cast<int>(ExitCode::stopped); }

bool was_stopped_early(const JobEnd& end) {
  const int signal = end.report.lost_rank ? end.report.lost_rank->signal : end.code - 128;
  return (signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGHUP) && !end.report.returned_code &&
         !end.report.lost_host;
}

bool is_failure(const JobEnd& end, bool stop_requested) {
  return !stop_requested && !end.report.stopped && !was_stopped_early(end) &&
         is_worth_retrying(static_cast<ExitCode>(exit_code_of(end)));
}

bool is_unfinished(const JobEnd& end) {
  const auto& report = end.report;
  return end.code == 0 && end.launcher_signal == 0 && report.starting && !report.run.empty() && !report.returned_code &&
         !end.stop_requested;
}

int times_to_ask_hosts(const JobEnd& end, bool stop_requested) {
  const auto& report = end.report;
  if (!is_failure(end, stop_requested) || report.returned_code) return 0;
  const bool is_explained = report.lost_rank || report.leaving || !report.error.empty() ||
                            !report.launcher_error.empty() || end.launcher_signal != 0 || end.not_up;
  return is_explained ? 1 : 5;
}

bool is_preemption(const JobEnd& end) {
  const auto& report = end.report;
  if (report.slurm_away || (report.lost_host && end.host_is_excused)) return true;
  return !report.run.empty() && (report.lost_host.has_value() || report.preempted || ended_by_sigterm(end));
}

NextStart decide(const JobEnd& end, const run::Failures& failures, const JobRequirements& requirements, int ranks,
                 bool stop_requested) {
  NextStart next{.code = exit_code_of(end), .ranks = requirements.ranks};
  const int needed = end.report.required_ranks.value_or(ranks);
  if (needed != ranks && needed <= requirements.ranks && !stop_requested) return {.again = true, .ranks = needed};
  if (!is_failure(end, stop_requested) ||
      !failures.may_retry(is_preemption(end) ? requirements.max_preemptions : requirements.max_failures))
    return next;
  next.again = true;
  next.wait = run::retry_delay(failures);
  // Whoever ends a whole job also sends SIGTERM to this process, and the signal may still be on its way: wait for it.
  if (ended_by_sigterm(end) || end.report.preempted) next.wait = std::max(next.wait, std::chrono::seconds(1));
  if (!end.report.launcher_error.empty() && !end.report.failed_rank && !end.report.slurm_away)
    next.ranks = std::max(requirements.min_workers, ranks / 2);
  return next;
}

std::string cause_of(const JobEnd& end, const std::string& in_file) {
  const auto& report = end.report;
  if (end.exceeded_grace) return "the ranks did not stop within the time that they were given, and were ended";
  constexpr auto stopped = static_cast<int>(ExitCode::stopped);
  if (end.code == stopped || exit_code_of(end) == stopped)
    return report.error.empty() ? "stopped on request" : report.error;
  if (report.lost_host && !report.launcher_error.empty())
    return report.launcher_error;  // if a host was lost, its ranks are lost with it
  if (end.not_up) return "the ranks did not come together: one did not start, or its host does not answer";
  if (const auto& lost = report.lost_rank)
    return str(lost->rank < 0 ? "a rank" : str("rank ", lost->rank), " (", lost->host, program_of(end, lost->rank),
               ") was ended by ", signal_text(lost->signal));
  if (!report.error.empty()) return report.error;
  if (!in_file.empty()) return in_file;
  if (!report.launcher_error.empty()) return report.launcher_error;
  if (end.code == 0 && report.step_cancelled) return "Slurm has cancelled the step of the ranks";
  if (end.launcher_signal != 0) return "the launcher was ended by " + signal_text(end.launcher_signal);
  if (!report.loaded && !report.failed_rank && !report.slurm.empty()) return "no rank has started: " + report.slurm;
  const auto where = !report.failed_rank ? std::string()
                                         : str(" on rank ", *report.failed_rank,
                                               report.failed_host.empty() ? "" : ", host " + report.failed_host,
                                               program_of(end, *report.failed_rank));
  if (report.exited_improperly)
    return "the program ended without MPI_Finalize, as by _exit()" + (where.empty() ? "" : "," + where);
  return str("the program ended with exit code ", end.code, where);
}

std::string log_hint(const JobEnd& end) {
  const auto& report = end.report;
  if (report.run.empty()) return {};
  // Logs have the numbers of a program's own ranks.
  const auto rank = report.lost_host || !end.programs.empty() ? -1
                    : report.lost_rank                        ? report.lost_rank->rank
                                                              : report.failed_rank.value_or(-1);
  if (rank < 0) return "The logs of the ranks are in " + report.run + "/logs";
  return str("The log of rank ", rank, " is ", log::file_of_rank(report.run, rank));
}

}  // namespace muster::detail::supervise
