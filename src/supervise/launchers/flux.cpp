// flux run, which starts the ranks of a job through the brokers of a Flux instance; according to flux-run(1),
// flux-job(1) and flux-shell-options(7).
#include "supervise/launcher_output.hpp"
#include "supervise/launchers/launchers.hpp"

#include <signal.h>

#include <cstdio>
#include <thread>

namespace muster::detail::supervise {
namespace {

// flux run prints the job's events, each with the seconds since the job began, and a last line:
//   2.134s: flux-shell[0]: FATAL: doom: fit: task rank 1 on host n2 failed and exit-on-error is set
//   2.250s: job.exception type=exec severity=0 fit: task rank 1 on host n2 failed and exit-on-error is set
//   2.250s: job.exception type=node-failure severity=2 node failure on n2 (shell rank 1)
//   flux-job: task(s) Killed                    or: flux-job: task(s) exited with exit code 3
constexpr std::string_view of_attach = "flux-job: ", job_end = "flux-job: task(s) ",
                           one_more = "flux-job: one more ctrl-C";
constexpr std::string_view start_failed = "start failed: ";

/// Reads the part of a line after the time. Returns false if it is no such event.
bool read_event(const std::string& text, LauncherReport& report) {
  std::array<char, 256> host{};
  int rank = 0, severity = -1, note = 0;
  std::sscanf(text.c_str(), "job.exception type=%255s severity=%d %n", host.data(), &severity, &note);
  if (note == 0 && !text.starts_with("flux-shell[")) return false;
  for (const std::string_view before :
       {"node failure on ", "lost contact with job shell on broker ", "lost contact with job shell on "})
    if (const auto at = text.find(before); at != std::string::npos) {
      const auto name = at + before.size();
      report.lose_host(text.substr(name, text.find(' ', name) - name), "Flux has lost the node ");
      return true;
    }
  const char* const task = text.c_str() + std::min(text.find("task rank "), text.size());
  int end = 0;
  std::sscanf(task, "task rank %d on host %255s failed and exit-on-error is set%n", &rank, host.data(), &end);
  if (end > 0) {
    if (!report.failed_rank) report.failed_host = host.data();
    report.failed_rank = report.failed_rank.value_or(rank);
    return true;
  }
  if (const auto at = text.find(start_failed); at != std::string::npos) {
    report.no_program = true;
    report.launcher_error = "starting " + text.substr(at + start_failed.size());
    return true;
  }
  if (severity == 0 && !report.loaded)
    report.keep_error("Flux cannot start the ranks: " + text.substr(static_cast<std::size_t>(note)));
  return severity == 0;
}

class Flux : public Launcher {
 public:
  Flux() {
    batch_system = "Flux";
    program = "flux";
    signals_early = true;
  }

  bool fits(const SuperviseOptions& options, const Environment& environment, const std::string&) const override {
    // Not inside a task of a Flux job: Flux would not give the task more ranks than it has.
    return options.hosts.empty() && environment("FLUX_URI") != nullptr && environment("FLUX_TASK_RANK") == nullptr;
  }

  std::vector<std::string> words(const Start& start) const override {
    // Without this option, the other tasks run for another 30 s when one has failed.
    std::vector<std::string> words{"run", "-n", std::to_string(start.ranks), "-o", "exit-on-error"};
    if (!start.lost.empty()) words.push_back("--requires=-host:" + joined({start.lost.begin(), start.lost.end()}));
    return words;
  }

  bool may_begin(std::string_view begun) const override {
    return may_become(begun, of_attach) || (begun.front() >= '0' && begun.front() <= '9');
  }

  bool read_line(std::string_view line, LauncherReport& report) const override {
    if (line.starts_with(one_more)) return true;  // a consequence of end()
    if (line.starts_with(job_end)) {
      const int signal = signal_named(line.substr(job_end.size()));
      if (signal != 0 && report.failed_rank && !report.lost_rank)
        report.lost_rank = {*report.failed_rank, report.failed_host, signal};
      return true;
    }
    const std::string text(line);
    int time = 0;
    std::sscanf(text.c_str(), "%*[0-9.]s: %n", &time);
    return time > 0 && read_event(text.substr(static_cast<std::size_t>(time)), report);
  }

  void end(pid_t process) const override {
    // A second SIGINT within two seconds cancels the job. Other signals would go to the ranks.
    ::kill(process, SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(process, SIGINT);
  }

  // A Flux instance may be part of a Slurm job, so Slurm's variables do not tell its nodes; Flux itself knows them.
  int nodes(const Environment&) const override { return 0; }
  int tasks(const Environment&) const override { return 0; }
};

}  // namespace

const Launcher& flux = Flux();

}  // namespace muster::detail::supervise
