// muster run, from the command line to the exit code: start the job, watch it, interpret its end, report, start again.
#include "muster/supervise.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/listed.hpp"
#include "base/log.hpp"
#include "launch/supervised.hpp"
#include "muster/config.hpp"
#include "muster/error.hpp"
#include "run/failures.hpp"
#include "supervise/decision.hpp"
#include "supervise/job.hpp"
#include "supervise/signals.hpp"
#include "supervise/slurm_steps.hpp"
#include "supervise/temporary_folders.hpp"
#include "sweep/progress.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <random>
#include <set>
#include <utility>

namespace muster {
namespace detail::supervise {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

const char* environment(const char* name) { return std::getenv(name); }

int own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
}

Launcher find_launcher(Launcher::Kind kind) {
  if (kind == Launcher::Kind::srun) {
    if (auto path = find_program("srun"); !path.empty()) return {kind, path};
    throw Error(ExitCode::missing_package, "starting the ranks", "this is a job of Slurm and there is no srun in PATH",
                "Load its module, or give --hosts");
  }
  for (const auto* name : {MUSTER_MPIEXEC, "mpirun", "mpiexec"})
    if (auto path = find_program(name); !path.empty()) return {kind, path};
  throw Error(ExitCode::missing_package, "starting the ranks",
              "there is no mpirun, neither " MUSTER_MPIEXEC " nor in PATH",
              "Install Open MPI's programs (Debian: openmpi-bin) or load its module");
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

/// The names of all variables MUSTER_… of this process, by which flags are set.
std::vector<std::string> flag_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (const std::string_view text = *entry; text.starts_with("MUSTER_"))
      names.emplace_back(text.substr(0, text.find('=')));
  return names;
}

/// Whether something waits to be read in a file or a pipe.
bool has_input() {
  struct stat input {};
  if (::fstat(STDIN_FILENO, &input) != 0) return false;
  if (S_ISREG(input.st_mode)) return ::lseek(STDIN_FILENO, 0, SEEK_CUR) < input.st_size;
  int bytes = 0;
  return S_ISFIFO(input.st_mode) && ::ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 && bytes > 0;
}

SupervisorInfo make_supervisor_info(const SuperviseOptions& options, int ranks) {
  std::random_device random;
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 32> started{};
  std::strftime(started.data(), started.size(), "%Y-%m-%d_%H-%M-%S", &local);
  return {.id = std::to_string(random()) + "." + std::to_string(::getpid()),
          .started = started.data(),
          .begin = now,
          .full_worker_count = options.min_workers ? ranks : 0};
}

/// How long the launcher may take to end once the ranks have said how the job ends, or one has failed; empty before
/// that. It may wait for a daemon on a node that does not answer, or for a rank that does not end.
std::optional<std::chrono::seconds> patience_with(const LauncherReport& report, Launcher::Kind kind) {
  if (report.agreed_exit_code) return std::chrono::seconds(60);
  // srun lets the other ranks go on. They cannot, but may have more to say.
  if (report.failed_rank && kind == Launcher::Kind::srun) return std::chrono::seconds(1);
  if (report.leaving || report.lost_rank) return std::chrono::seconds(10);
  return {};
}

std::string in_seconds(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::round<std::chrono::seconds>(time).count()) + " s";
}

/// One start, to its end: nothing of it is left then.
JobEnd watch(Job& job, Launcher::Kind kind, Signals& signals, const SuperviseOptions& options) {
  LauncherOutput output;
  const auto show = [&](const std::string& text) { std::cerr << text << std::flush; };
  bool told = false;
  std::optional<Clock::time_point> deadline, start_limit;
  std::optional<std::chrono::seconds> patience;
  Clock::time_point end_of_patience;
  const auto load_limit = Clock::now() + options.start_limit;
  bool warned = false;
  // Of stdout, which the ranks write to, and stderr only whether their readers have gone.
  std::array<int, 2> read_by_others{STDOUT_FILENO, STDERR_FILENO};
  JobEnd end;
  while (!job.ended() && !signals.stop_immediately()) {
    if (signals.stop_requested() && !deadline) {
      deadline = Clock::now() + options.grace;
      log::info("stopping; the ranks have " + in_seconds(options.grace) +
                " to save their state. A second Ctrl-C ends them at once");
    }
    // Over several hosts mpirun starts its daemons first, and a signal ends it meanwhile.
    const bool may_ask = options.hosts.empty() || output.report().loaded;
    if (deadline && !told && may_ask) told = job.ask_to_stop();
    if (deadline && Clock::now() >= *deadline) {
      end.exceeded_grace = true;
      break;
    }
    const auto& report = output.report();
    if (!report.loaded && !warned && Clock::now() >= load_limit) {
      warned = true;
      log::warn("no rank has started within " + in_seconds(options.start_limit) + ": " +
                (report.slurm.empty() ? "the launcher may wait for a host (ssh), the program for a file system"
                                      : "the last that Slurm has said is \"" + report.slurm + "\""));
    }
    if (report.starting && !start_limit) start_limit = Clock::now() + options.start_limit;
    if (start_limit && !report.up && Clock::now() >= *start_limit) {
      end.not_up = true;
      break;
    }
    if (const auto now = patience_with(report, kind); now && now != patience) {
      patience = now;
      end_of_patience = Clock::now() + *patience;
    }
    if (patience && Clock::now() >= end_of_patience) break;
    const int timeout = deadline && !told ? 10 : 100;  // ms
    std::array<pollfd, 4> sources{{{signals.descriptor(), POLLIN, 0},
                                   {job.output(), POLLIN, 0},
                                   {read_by_others[0], 0, 0},
                                   {read_by_others[1], 0, 0}}};
    ::poll(sources.data(), sources.size(), timeout);
    signals.take();
    for (std::size_t i = 0; i < read_by_others.size(); ++i) {
      const auto events = sources[i + 2].revents;
      if ((events & (POLLERR | POLLNVAL)) == 0) continue;
      read_by_others[i] = -1;
      if ((events & POLLNVAL) != 0) continue;  // it was closed before this process was started
      log::warn(std::string("nobody reads standard ") + (i == 0 ? "output" : "error") +
                " any more, to which the ranks write");
      signals.request_stop();
    }
    show(output.take(job.read()));
  }
  end.code = job.code();
  end.launcher_signal = job.signal();
  end.stop_requested = signals.stop_requested();
  const bool ended_by_itself = job.ended();
  job.end();
  show(output.take(job.read()) + output.finish());
  end.report = output.report();
  if (end.report.exit_code) end.code = *end.report.exit_code;  // srun's own may be another rank's
  if (!ended_by_itself && end.report.leaving) end.code = *end.report.leaving;
  if (!ended_by_itself && end.report.agreed_exit_code) end.code = *end.report.agreed_exit_code;
  // A node that has gone in silence: its launcher's daemon says nothing, but the other ranks have asked it.
  if (end.report.silent && !end.report.lost_host && (end.report.leaving || !ended_by_itself)) {
    end.report.lost_host = end.report.silent;
    if (end.report.launcher_error.empty())
      end.report.launcher_error = "the node " + *end.report.silent + " does not answer";
  }
  return end;
}

/// The contents of the error.txt that the ranks of this start have written. They tell us when they have written it;
/// file times cannot be used, since they come from another machine's clock.
std::string read_kept_cause(const LauncherReport& report) {
  if (report.run.empty() || !report.has_error_file) return {};
  try {
    auto text = read_file(fs::path(report.run) / "error.txt", 1 << 20);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  } catch (const Error& error) {
    return std::string("the ranks have left a cause that cannot be read: ") + error.what();
  }
}

/// A limit from the run's saved options, or in a sweep from its first trial's; empty if the run did not save any.
std::optional<int> saved_limit(const fs::path& run, const char* limit) {
  for (const auto& folder : {run, run / sweep::first_trial}) try {
      return read_json(folder / "params.json").at("run_config").at(limit).get<int>();
    } catch (const std::exception&) {
    }
  return {};
}

/// A limit of the run's FailureConfig.
int configured_limit(const fs::path& run, const char* limit) {
  return saved_limit(run, limit).value_or(Json(FailureConfig{}).at(limit).get<int>());
}

/// The limit after an end with that code: an operator's train() has its own limit for lost ranks.
int max_failures(const fs::path& run, int code) {
  const auto retries = code == static_cast<int>(ExitCode::retry) ? saved_limit(run, "max_retries") : std::nullopt;
  return retries ? *retries : configured_limit(run, "max_failures");
}

/// Waits before the next start; returns false if a signal has ended the wait.
bool wait(Signals& signals, std::chrono::seconds time) {
  const auto until = Clock::now() + time;
  while (!signals.stop_requested()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) return true;
    pollfd source{signals.descriptor(), POLLIN, 0};
    ::poll(&source, 1, static_cast<int>(left));
    signals.take();
  }
  return false;
}

/// The supervision of a job: what its starts have in common, and what is known about them.
class Supervision {
 public:
  explicit Supervision(const SuperviseOptions& options)
      : options_(options),
        launcher_(find_launcher(launcher_kind(options, environment))),
        requirements_{.ranks = wanted_ranks(options, environment, own_cpus()), .max_failures = 0} {
    check(options, requirements_.ranks, environment);
    requirements_.min_workers = options.min_workers.value_or(requirements_.ranks);
    supervisor_info_ = make_supervisor_info(options, requirements_.ranks);
    if (leaves_this_host(options, host_name(), environment) && find_program("ssh").empty() &&
        find_program("rsh").empty())
      throw Error(ExitCode::missing_package, "starting the ranks on " + options.hosts, "there is no ssh in PATH",
                  "Install it (Debian: openssh-client), or name another program in OMPI_MCA_plm_rsh_agent");
    if (has_input())
      log::warn("standard input is not passed on to the ranks, which may be started again; give the program a file");
    if (launcher_.kind == Launcher::Kind::mpirun && options.hosts.empty() && find_program(options.command[0]).empty()) {
      const auto& program = options.command[0];
      const bool there = program.find('/') != std::string::npos && fs::exists(status_of(program));
      throw Error(ExitCode::usage, "starting " + program,
                  there ? "it is not a file that may be executed" : "there is no such program",
                  there ? "Look at its mode, or name another" : "Give the path of one, as in ./fit");
    }
  }

  int run() {
    for (int ranks = requirements_.ranks;;) {
      auto end = start(ranks);
      if (signals_.stop_immediately()) return interrupted();
      if (!end.report.run.empty()) run_ = end.report.run;
      if (end.report.min_workers) set_min_workers(*end.report.min_workers);
      leave_out_lost_host(end);
      const int code = exit_code_of(end);
      if (end.stop_requested && !end.report.loaded && !end.report.no_program) return stopped_between_starts();
      if (code == 0) return finish_successfully(end);
      const auto cause = cause_of(end, read_kept_cause(end.report));
      if (is_failure(end, signals_.stop_requested())) is_preemption(end) ? count_preemption() : count(code);
      auto next = decide(end, counted_failures(end), requirements_, ranks, signals_.stop_requested());
      if (end.report.lost_host) next.ranks = ranks_without(lost_hosts_, options_, requirements_.ranks, environment);
      // A killed rank cannot write its cause itself.
      if (end.report.lost_rank || end.launcher_signal != 0 || end.exceeded_grace) cause_to_keep_ = cause;
      if (!next.again) return give_up(end, cause, next.code);
      announce_next_start(end, cause, next);
      if (end.report.required_ranks) wait_for_ranks(next.ranks);
      if (!wait(signals_, next.wait)) return stopped_between_starts();
      ranks = next.ranks;
    }
  }

 private:
  JobEnd start(int ranks) {
    JobEnd end;
    auto command = launch_command(launcher_, options_, ranks, lost_hosts_, supervisor_info_, folders_.paths(),
                                  environment, flag_variables());
    // Slurm keeps the step of a lost node until it has noticed the loss, and srun would wait for the CPUs of that step.
    if (!sruns_.empty() && !end_steps(sruns_, host_name())) command.environment.emplace_back("SLURM_OVERLAP", "1");
    {
      Job job(command, launcher_.kind, /*has_remote_ranks=*/!options_.hosts.empty());
      if (launcher_.kind == Launcher::Kind::srun) sruns_.insert(job.launcher());
      keep_cause();  // which the ranks need not wait for
      end = watch(job, launcher_.kind, signals_, options_);
    }
    folders_.empty();
    return end;
  }

  /// Uses the program's least number of workers, unless --min-workers was given.
  void set_min_workers(int least) {
    if (options_.min_workers) return;
    requirements_.min_workers = std::clamp(least, 1, requirements_.ranks);
    supervisor_info_.full_worker_count = requirements_.ranks;
  }

  /// From now on, starts exactly as many ranks as the saved state requires.
  void wait_for_ranks(int ranks) {
    waits_for_ranks_ = true;
    requirements_.ranks = requirements_.min_workers = ranks;
  }

  /// The counted failures of the same kind as `end`.
  const run::Failures& counted_failures(const JobEnd& end) const {
    return is_preemption(end) ? preemptions_ : failures_;
  }

  void count_preemption() {
    requirements_.max_preemptions = configured_limit(run_, "max_preemption_failures");
    preemptions_ = run::add_failure(preemptions_, run_, sweep::progress);
  }

  /// Counts one more failure; the job may have counted some itself.
  void count(int code) {
    requirements_.max_failures = options_.max_failures ? *options_.max_failures : max_failures(run_, code);
    if (run_.empty()) {
      failures_ = failures_.with_one_more({});
      return;
    }
    auto before = run::read_failures(run_, supervisor_info_.id).value_or(failures_);
    auto known = failures_.furthest;  // a run that follows a sweep knows of no trials
    before.furthest.merge(known);
    failures_ = run::add_failure(before, run_, sweep::progress);
    try {
      run::write_failures(run_, supervisor_info_.id, failures_);
    } catch (const std::exception& error) {
      log::warn(std::string("the number of failures is not kept in the run's folder: ") + error.what());
    }
  }

  void keep_cause() {
    const auto cause = std::exchange(cause_to_keep_, {});
    if (run_.empty() || cause.empty()) return;
    try {
      write_file(run_ / "error.txt", cause + "\n");
    } catch (const Error& error) {
      log::warn(std::string("the cause of the failure is not kept: ") + error.what());
    }
  }

  /// Leaves out the host that the launcher says it has lost, if enough ranks fit on the others. After a start without
  /// host problems, all hosts are tried again.
  void leave_out_lost_host(JobEnd& end) {
    if (end.report.launcher_error.empty()) lost_hosts_.clear();
    if (!end.report.lost_host) return;
    lost_hosts_.insert(*end.report.lost_host);
    const bool enough =
        ranks_without(lost_hosts_, options_, requirements_.ranks, environment) >= requirements_.min_workers;
    end.host_is_excused = enough || waits_for_ranks_;
    if (!enough) lost_hosts_.clear();
  }

  int give_up(const JobEnd& end, const std::string& cause, int code) {
    keep_cause();
    auto text = cause;
    if (is_failure(end, signals_.stop_requested())) {
      if (is_preemption(end))
        text += ". It is not started again: " + std::to_string(preemptions_.count) +
                " preemptions since the last progress, and max_preemption_failures is " +
                std::to_string(requirements_.max_preemptions);
      else if (requirements_.max_failures > 0)
        text += ". It is not started again: " + std::to_string(failures_.count) +
                " failures since the last progress, and --max-failures is " +
                std::to_string(requirements_.max_failures);
      if (const auto where = log_hint(end); !where.empty()) text += ". " + where;
    }
    log::error(text);
    return code;
  }

  void announce_next_start(const JobEnd& end, const std::string& cause, const NextStart& next) const {
    auto text = cause;
    if (const auto where = log_hint(end); !where.empty()) text += ". " + where;
    text += ". Starting again";
    if (next.ranks != requirements_.ranks || end.report.required_ranks)
      text += " with " + detail::counted(next.ranks, "rank");
    if (next.wait.count() > 0) text += " in " + std::to_string(next.wait.count()) + " s";
    if (end.report.required_ranks)
      return log::warn(text + ", as its saved state requires, once that many are available");
    const auto& failures = counted_failures(end);
    const int most = is_preemption(end) ? requirements_.max_preemptions : requirements_.max_failures;
    text += failures.furthest.empty() ? "" : " from the newest checkpoint";
    text += (is_preemption(end) ? " (preemption " : " (failure ") + std::to_string(failures.count);
    if (most > 0) text += " of " + std::to_string(most);
    log::warn(text + ")");
  }

  /// The ranks had finished their work; reports what happened after it.
  static int finish_successfully(const JobEnd& end) {
    if (end.code != 0 || end.launcher_signal != 0)
      log::warn("the work is done; after that " + cause_of(end, ""));
    else if (!end.report.error.empty())  // printed by a program that went on and ended with code 0
      log::error(end.report.error);
    return 0;
  }

  static int interrupted() {
    log::error("interrupted; what came after the newest checkpoint is lost");
    return static_cast<int>(ExitCode::interrupted);
  }

  int stopped_between_starts() {
    keep_cause();
    if (signals_.stop_immediately()) return interrupted();
    const bool saved = !failures_.furthest.empty() || !preemptions_.furthest.empty();
    log::error(saved          ? "stopped on request before the next start; the newest checkpoint has the state"
               : run_.empty() ? "stopped on request before the ranks had started"
                              : "stopped on request before the next start, and there is no state saved");
    return static_cast<int>(saved ? ExitCode::stopped : ExitCode::retry);
  }

  const SuperviseOptions& options_;
  Launcher launcher_;
  JobRequirements requirements_;
  SupervisorInfo supervisor_info_;
  Signals signals_;
  TemporaryFolders folders_;
  run::Failures failures_;        ///< of this muster run, without preemptions
  run::Failures preemptions_;     ///< of this muster run
  Hosts lost_hosts_;              ///< hosts that the next start leaves out
  std::set<pid_t> sruns_;         ///< of all starts
  bool waits_for_ranks_ = false;  ///< true if the saved state requires all requested ranks
  std::string cause_to_keep_;     ///< the cause still to be written to the run's error.txt
  fs::path run_;                  ///< the run's folder, once a rank has reported it
};

}  // namespace
}  // namespace detail::supervise

int supervise(const SuperviseOptions& options) { return detail::supervise::Supervision(options).run(); }

}  // namespace muster
