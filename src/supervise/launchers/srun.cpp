// srun, which starts the ranks of a Slurm job by Slurm's daemons.
#include "supervise/launcher_output.hpp"
#include "supervise/launchers/launchers.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>

namespace muster::detail::supervise::srun {
namespace {

/// Slurm's lines begin with these.
constexpr std::array<std::string_view, 2> prefixes{"srun: ", "slurmstepd"};
/// What they say about the end of a step, which we report ourselves.
constexpr std::array<std::string_view, 13> step_end_phrases{": *** STEP ",
                                                            ": *** JOB ",
                                                            "Job step aborted: ",
                                                            "forcing job termination",
                                                            "Terminating StepId=",
                                                            "Force Terminated Step",
                                                            "Complete StepId=",
                                                            "got SIGCONT",
                                                            "Timed out waiting for job step to complete",
                                                            "setting nnodes to ",
                                                            " aborted before step completely launched",
                                                            "Application launch failed: ",
                                                            ": Error handler invoked: "};
constexpr std::string_view unable = "srun: error: Unable to ", no_controller = "Unable to contact slurm controller";
constexpr std::string_view no_step = "srun: error: Unable to create step for job ";
constexpr std::array<std::string_view, 2> preemption_phrases{" DUE TO PREEMPTION", " DUE TO NODE FAILURE"};
constexpr std::array<std::string_view, 2> cancel_phrases{": *** STEP ", ": *** JOB "};

/// How the tasks find each other with this MPI.
std::string plugin_for(const std::string& mpi) {
  const auto is = [&](std::string_view name) { return mpi.find(name) != std::string::npos; };
  return is("CRAY") ? "cray_shasta" : is("MPICH") || is("Intel") || is("MVAPICH") ? "pmi2" : "pmix";
}

/// Reads "srun: error: n1: task 1: Killed", or "srun: error: n1: tasks 0,2-3: Killed"; false for other lines.
bool read_task(const std::string& text, LauncherReport& report) {
  std::array<char, 256> host{};
  int rank = 0, end = 0;
  if (std::sscanf(text.c_str(), "srun: error: %255[^:]: task%*[s ]%d%n", host.data(), &rank, &end) != 2) return false;
  const auto fact = text.find(": ", static_cast<std::size_t>(end));
  if (fact == std::string::npos) return true;
  const int signal = signal_named(std::string_view(text).substr(fact + 2));
  // The first failure counts, except that srun sends SIGTERM to all others when one task has failed.
  const bool replaces = report.lost_rank && report.lost_rank->signal == SIGTERM && signal != SIGTERM;
  if (report.failed_rank && !replaces) return true;
  report.failed_rank = rank;
  report.failed_host = host.data();
  report.lost_rank.reset();
  // After MPI_Abort or a lost node, Slurm kills the others.
  const bool follows = !report.launcher_error.empty() || (report.leaving && signal == SIGKILL);
  if (signal != 0 && !follows) report.lost_rank = {rank, host.data(), signal};
  int code = 0;
  report.exit_code.reset();
  if (std::sscanf(text.c_str() + fact, ": Exited with exit code %d", &code) == 1) report.exit_code = code;
  return true;
}

}  // namespace

void add_words(std::vector<std::string>& words, const Launcher& launcher, const Start& start) {
  // When a rank has failed, Job::end() has the others killed at once. --kill-on-bad-exit would send SIGTERM, by which
  // Slurm asks ranks to save, and SIGKILL only after KillWait, 30 s by default.
  words.insert(words.end(), {"--mpi=" + plugin_for(launcher.mpi), "--kill-on-bad-exit=0"});
  if (!start.lost.empty()) words.push_back("--exclude=" + joined({start.lost.begin(), start.lost.end()}));
  if (start.het_group >= 0) words.push_back("--het-group=" + std::to_string(start.het_group));
  // Without the number, srun asks for as many nodes as the job has.
  if (start.nodes > 0) words.push_back("--nodes=" + std::to_string(start.nodes));
  words.insert(words.end(), {"-n", std::to_string(start.ranks)});
}

Variables settings(const Launcher&, const Start&) { return {}; }

bool may_begin(std::string_view begun) {
  return std::ranges::any_of(prefixes, [&](auto prefix) { return may_become(begun, prefix); });
}

bool read_line(std::string_view line, LauncherReport& report) {
  if (std::ranges::none_of(prefixes, [&](auto prefix) { return line.starts_with(prefix); })) return false;
  if (contains_any(line, preemption_phrases)) report.preempted = true;
  if (contains_any(line, cancel_phrases)) report.step_cancelled = true;
  const std::string text(line);
  std::array<char, 256> host{};
  int rank = 0, end = 0;
  if (read_task(text, report)) return true;
  if (std::sscanf(text.c_str(), "srun: error: Node failure on %255s", host.data()) == 1) {
    report.lost_host = host.data();
    if (report.launcher_error.empty()) report.launcher_error = "Slurm has lost the node " + *report.lost_host;
  } else if (std::sscanf(text.c_str(), "srun: error: Task launch for %*s failed on node %255[^:]", host.data()) == 1) {
    // Slurm has not yet noticed that the node is lost. It then kills the ranks of the other nodes.
    report.lost_host = host.data();
    if (report.launcher_error.empty())
      report.launcher_error = "Slurm cannot start a rank on the node " + *report.lost_host;
  } else if (std::sscanf(text.c_str(), "srun: error: task %d launch failed: %n", &rank, &end) == 1 && end > 0) {
    // Slurm then kills the others. Another start may succeed with as many ranks.
    report.failed_rank = rank;
    report.lost_rank.reset();
    if (report.launcher_error.empty())
      report.launcher_error =
          "Slurm cannot start rank " + std::to_string(rank) + ": " + text.substr(static_cast<std::size_t>(end));
  } else if (text.starts_with(unable) && text.find(no_controller) != std::string::npos) {
    report.slurm_away = true;
    report.launcher_error = "Slurm's controller does not answer";
  } else if (report.slurm_away && text.starts_with("srun: Check SLURM_JOB_ID environment variable")) {
    // It takes the job for one that has ended.
  } else if (text.starts_with(no_step)) {
    if (report.launcher_error.empty())
      report.launcher_error = "Slurm cannot start the ranks" + text.substr(text.find(": ", no_step.size()));
  } else if (!contains_any(line, step_end_phrases)) {
    report.slurm = text;
    return !report.shown_of_slurm.insert(text).second;
  }
  return true;
}

}  // namespace muster::detail::supervise::srun
