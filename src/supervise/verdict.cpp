#include "supervise/verdict.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace muster::detail::supervise {
namespace {

std::string signal_text(int signal) {
  return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")" +
         (signal == SIGKILL   ? ", as the kernel does when memory runs out"
          : signal == SIGUSR1 ? ", the request to stop, which the program does not handle (yet)"
                              : "");
}

/// True if a rank was lost. Some launchers report this only by an exit code like a shell's, 128 + signal.
bool lost_a_rank(const End& end) {
  const bool as_in_shells = end.code > 128 && end.code < 160 && end.code != static_cast<int>(ExitCode::interrupted);
  return end.words.lost.has_value() || end.launcher_signal != 0 || as_in_shells;
}

bool ended_by_sigterm(const End& end) {
  return (end.words.lost && end.words.lost->signal == SIGTERM) || end.launcher_signal == SIGTERM;
}

}  // namespace

int code_of(const End& end) {
  if (end.words.no_program) return static_cast<int>(ExitCode::usage);
  // mpirun that is told to stop before its ranks are there may end with 0.
  const bool no_ranks = (end.code != 0 && !end.words.launcher.empty()) || (end.stop_wished && !end.words.loaded);
  const bool broken_off = lost_a_rank(end) || end.grace_over || end.not_up || no_ranks;
  if (!broken_off) return end.code;
  return end.words.ended.value_or(static_cast<int>(ExitCode::retry));
}

bool is_failure(const End& end, bool stop_wished) {
  return !stop_wished && !end.words.stopped && train::may_help(static_cast<ExitCode>(code_of(end)));
}

bool is_preemption(const End& end) {
  const auto& words = end.words;
  if (words.host && end.host_is_excused) return true;
  return !words.run.empty() && (words.host.has_value() || words.preempted || ended_by_sigterm(end));
}

Next what_next(const End& end, const train::Failures& failures, const Demand& demand, int ranks, bool stop_wished) {
  Next next{.code = code_of(end), .ranks = demand.ranks};
  const int needed = end.words.needed.value_or(ranks);
  if (needed != ranks && needed <= demand.ranks && !stop_wished) return {.again = true, .ranks = needed};
  if (!is_failure(end, stop_wished) ||
      !failures.may_retry(is_preemption(end) ? demand.max_preemptions : demand.max_failures))
    return next;
  next.again = true;
  next.wait = train::back_off(failures);
  // Whoever ends a whole job sends SIGTERM to this process too: it may be on its way.
  if (ended_by_sigterm(end) || end.words.preempted) next.wait = std::max(next.wait, std::chrono::seconds(1));
  if (!end.words.launcher.empty()) next.ranks = std::max(demand.min_workers, ranks / 2);
  return next;
}

std::string cause_of(const End& end, const std::string& in_file) {
  const auto& words = end.words;
  if (end.grace_over) return "the ranks did not stop within the time that they were given, and were ended";
  if (end.not_up) return "the ranks did not come together: one did not start, or its host does not answer";
  if (end.code == static_cast<int>(ExitCode::stopped)) return words.error.empty() ? "stopped on request" : words.error;
  if (words.host && !words.launcher.empty()) return words.launcher;  // its ranks were lost with the host
  if (const auto& lost = words.lost)
    return "rank " + std::to_string(lost->rank) + " (" + lost->host + ") was ended by " + signal_text(lost->signal);
  if (!words.error.empty()) return words.error;
  if (!in_file.empty()) return in_file;
  if (!words.launcher.empty()) return words.launcher;
  if (end.launcher_signal != 0) return "the launcher was ended by " + signal_text(end.launcher_signal);
  if (!words.loaded && !words.failed_rank && !words.slurm.empty()) return "no rank has started: " + words.slurm;
  return (words.failed_rank ? "rank " + std::to_string(*words.failed_rank) : "the program") + " ended with exit code " +
         std::to_string(end.code);
}

std::string where_to_look(const End& end) {
  const auto& words = end.words;
  if (words.run.empty()) return {};
  const auto rank = words.lost ? words.lost->rank : words.failed_rank.value_or(-1);
  if (rank < 0) return "The logs of the ranks are in " + words.run + "/logs";
  std::array<char, 32> file{};
  std::snprintf(file.data(), file.size(), "rank_%05d.log", rank);
  return "The log of rank " + std::to_string(rank) + " is " + words.run + "/logs/" + file.data();
}

}  // namespace muster::detail::supervise
