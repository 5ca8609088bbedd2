// muster run, from the command line to the exit code: it starts the job, watches it, interprets its end, reports, and
// starts it again.
#include "muster/supervise.hpp"

#include "base/cpus.hpp"
#include "base/duration.hpp"
#include "base/file.hpp"
#include "base/host.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/run_names.hpp"
#include "base/temporary.hpp"
#include "base/text.hpp"
#include "comm/mpi_scope.hpp"
#include "launch/job_end.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "supervise/decision.hpp"
#include "supervise/failure_counts.hpp"
#include "supervise/job.hpp"
#include "supervise/lost_hosts.hpp"
#include "supervise/signals.hpp"
#include "supervise/slurm.hpp"
#include "supervise/temporary_folders.hpp"
#include "supervise/terminal.hpp"
#include "supervise/watch.hpp"
#include "sweep/progress.hpp"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>
#include <utility>

namespace muster {
namespace detail::supervise {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

const char* environment(const char* name) { return std::getenv(name); }

/// True if standard input is a file or a pipe with something left to read.
bool has_input() {
  struct stat input {};
  if (::fstat(STDIN_FILENO, &input) != 0) return false;
  if (S_ISREG(input.st_mode)) return ::lseek(STDIN_FILENO, 0, SEEK_CUR) < input.st_size;
  int bytes = 0;
  return S_ISFIFO(input.st_mode) && ::ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 && bytes > 0;
}

SupervisorInfo make_supervisor_info(const SuperviseOptions& options, int ranks) {
  std::random_device random;
  return {.id = str(random(), ".", ::getpid()),
          .started = run_names::time_now(),
          .full_worker_count = options.min_workers ? ranks : 0};
}

/// Returns the error.txt that the ranks of this start have written; empty if they have not. The ranks tell when they
/// have written it; the file's time cannot be used, since another machine's clock may have set it.
std::string read_kept_cause(const LauncherReport& report) {
  if (report.run.empty() || !report.has_error_file) return {};
  try {
    auto text = read_file(fs::path(report.run) / run_names::error, 1 << 20);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  } catch (const Error& error) {
    return str("the ranks have left a cause that cannot be read: ", error.what());
  }
}

/// Waits before the next start. Returns false if a request to stop has ended the wait.
bool wait(Signals& signals, std::chrono::seconds time) {
  const auto until = Clock::now() + time;
  while (!signals.stop_requested()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) return true;
    pollfd source{signals.descriptor(), POLLIN, 0};
    ::poll(&source, 1, static_cast<int>(left));
    signals.take();
    if (signals.take_suspension()) signals.suspend();
  }
  return false;
}

/// The run that the ranks have reported, over all starts.
struct ReportedRun {
  fs::path folder = {};    ///< empty until a rank has reported it
  fs::path finished = {};  ///< equals `folder` if the run was finished when the last start was lost; else empty
  std::string cause = {};  ///< cause of a failure that is yet to be written to error.txt

  /// True if the run's folder is gone, so that another start would begin a new run.
  bool is_gone() const {
    return !folder.empty() && !fs::exists(status_of(folder)) && fs::exists(status_of(folder.parent_path()));
  }

  /// True if the run is finished. False for a sweep's folder, since a run in it belongs to what follows the sweep.
  bool is_finished() const try {
    return !folder.empty() && !fs::exists(status_of(folder / run_names::sweep)) &&
           read_json(folder / run_names::params).value("finished", false);
  } catch (const std::exception&) {
    return false;  // the file has not been written yet, or another host has it
  }

  /// True if this start and the one before were both lost when the same run was finished: then another start would find
  /// nothing to do. After the first such loss it may find something: another run of the program, or more epochs of this
  /// one.
  bool is_finished_again(const JobEnd& end) {
    if (end.report.run.empty()) return false;  // the start was lost before a run was reported
    const auto before = std::exchange(finished, is_finished() ? folder : fs::path());
    return !before.empty() && before == finished;
  }

  void write_cause(Terminal& terminal) {
    const auto text = std::exchange(cause, {});
    if (folder.empty() || text.empty()) return;
    try {
      write_file(folder / run_names::error, text + "\n");
    } catch (const Error& error) {
      terminal.warn(str("the cause of the failure is not kept: ", error.what()));
    }
  }
};

/// When this process has begun, and when its batch job will end.
struct JobTime {
  Clock::time_point begin = Clock::now();
  launch::JobEndTime end = {};  ///< none if unknown

  /// True if the ranks were told that the job ends, or if they have stopped by themselves shortly before its end.
  bool is_over(const Signals& signals) const {
    if (signals.stop_requested() || !end) return signals.time_is_over();
    const char* const variable = environment("SLURM_JOB_START_TIME");
    const auto now = std::chrono::system_clock::now();
    const auto job_begin = variable ? std::chrono::system_clock::from_time_t(std::atoll(variable))
                                    : now - std::chrono::round<std::chrono::seconds>(Clock::now() - begin);
    return *end - now < (*end - job_begin) / 10;
  }
};

/// Supervises a job: what all its starts have in common, and what the starts so far have shown.
class Supervision {
 public:
  explicit Supervision(const SuperviseOptions& given)
      : options_(with_hosts_of_job(with_ranks_of_programs(given), environment)),
        launcher_(find_launcher(options_)),
        requirements_{.ranks = wanted_ranks(options_, environment, count_usable_cores(), launcher_.kind),
                      .max_failures = 0},
        supervisor_info_(make_supervisor_info(options_, requirements_.ranks)),
        failures_(options_.max_failures, supervisor_info_.id, terminal_),
        // If a Slurm job has lost a node, the node does not come back to the job.
        lost_(launcher_.kind.uses_daemons() ? std::vector<std::string>() : login_program(environment)) {
    const auto& options = options_;
    check(options, requirements_.ranks, all_slots(options, environment, count_usable_cores(), launcher_.kind),
          environment, launcher_.kind, host_name());
    requirements_.min_workers = options.min_workers.value_or(requirements_.ranks);
    find_job_end();
    if (leaves_this_host(options, host_name(), environment) && find_program("ssh").empty() &&
        find_program("rsh").empty())
      throw Error(ExitCode::missing_package, "starting the ranks on " + options.hosts, "there is no ssh in PATH",
                  "Install it (Debian: openssh-client), or name another program in OMPI_MCA_plm_rsh_agent");
    if (has_input())
      log::warn("standard input is not passed on to the ranks, which may be started again; give the program a file");
    if (!Job::sees_processes())
      log::warn(
          "/proc does not show the processes of this machine: what a rank starts and leaves may go on when the job "
          "has ended. Mount it, as in mount -t proc proc /proc");
    for (const auto& [command, ranks] : programs_of(options)) {
      const auto& program = command[0];
      if (launcher_.kind.uses_daemons() || !options.hosts.empty() || !find_program(program).empty()) continue;
      const bool there = program.find('/') != std::string::npos && fs::exists(status_of(program));
      throw Error(ExitCode::usage, "starting " + program,
                  there ? "it is not a file that may be executed" : "there is no such program",
                  there ? "Look at its mode, or name another" : "Give the path of one, as in ./fit");
    }
  }

  int run() {
    const int code = run_job();
    if (code == static_cast<int>(ExitCode::stopped) && time_.is_over(signals_)) queue_again("the job's time is over");
    return code;
  }

 private:
  int run_job() {
    announce_first_start();
    std::set<pid_t> processes;  // processes of the launchers of all starts
    for (int ranks = requirements_.ranks;;) {
      auto end = start(ranks, processes);
      if (signals_.stop_immediately() && end.report.returned_code != 0) return interrupted();
      if (!end.report.run.empty()) run_.folder = end.report.run;
      if (end.report.min_workers) set_min_workers(*end.report.min_workers);
      const int code = exit_code_of(end);
      const bool without_launch = was_stopped_early(end);
      if ((without_launch || (end.stop_requested && !has_started(end))) && !end.report.no_program)
        return stopped_between_starts(without_launch || end.had_ranks);
      if (code == 0) return finish_successfully(end);
      if (end.grows && code == static_cast<int>(ExitCode::stopped) && !signals_.stop_requested()) {
        ranks = ranks_on(lost_.hosts());
        continue;
      }
      leave_out_lost_hosts(end);
      const auto cause = cause_of(end, read_kept_cause(end.report));
      if (is_failure(end, signals_.stop_requested())) failures_.add(end, run_.folder, requirements_);
      auto next = decide(end, failures_.like(end), requirements_, ranks, signals_.stop_requested());
      if (end.report.lost_host) next.ranks = requirements_.ranks;
      if (!lost_.hosts().empty()) next.ranks = std::min(next.ranks, ranks_on(lost_.hosts()));
      // A failed node has left the job for good. If the job is queued again, it gets all its nodes.
      if (end.report.lost_host && !end.host_is_excused && launcher_.kind.uses_daemons() &&
          queue_again(cause + ". Too few nodes of the job are left"))
        return static_cast<int>(ExitCode::retry);
      // A killed rank could not write the cause to error.txt itself.
      if (end.report.lost_rank || end.launcher_signal != 0 || end.exceeded_grace) run_.cause = cause;
      if (!next.again) return give_up(end, cause, next.code);
      // The storage of other hosts may not be visible here.
      const bool is_local = !launcher_.kind.uses_daemons() && options_.hosts.empty();
      if (is_local && run_.is_gone()) {
        terminal_.error(cause + ". It is not started again: the run's folder " + run_.folder.string() +
                        " was moved away or removed. Start again with the --storage and --name of the folder");
        return static_cast<int>(ExitCode::usage);
      }
      if (run_.is_finished_again(end)) {
        terminal_.error(cause + ". It is not started again: two starts in a row were lost when the run " +
                        run_.folder.string() + " was finished, and began no other run");
        return next.code;
      }
      announce_next_start(end, cause, next);
      if (end.report.required_ranks) wait_for_ranks(next.ranks);
      if (!wait(signals_, next.wait)) return stopped_between_starts();
      ranks = next.ranks;
    }
  }

  JobEnd start(int ranks, std::set<pid_t>& processes) {
    JobEnd end;
    supervisor_info_.used = std::chrono::floor<std::chrono::seconds>(Clock::now() - time_.begin);
    auto command = launch_command(launcher_, options_, ranks, lost_.hosts(), supervisor_info_, folders_.paths(),
                                  environment, variable_names("MUSTER_"));
    for (auto& variable : launcher_.kind.end_earlier(processes, host_name()))
      command.environment.push_back(std::move(variable));
    {
      Job job(command, launcher_.kind, /*has_remote_ranks=*/!other_hosts(options_, host_name()).empty());
      processes.insert(job.process());
      run_.write_cause(terminal_);  // the ranks need not wait for this
      end = watch(job, launcher_.kind, signals_, terminal_, options_,
                  [&](const LauncherReport& report) { return should_grow(report, ranks); });
    }
    folders_.empty();
    if (!names_several_programs(options_)) return end;
    end.report.required_ranks.reset();  // said of one program
    for (const auto& [words, own_ranks] : programs_of(options_))
      end.programs.insert(end.programs.end(), static_cast<std::size_t>(*own_ranks), words[0]);
    return end;
  }

  /// Uses the least number of workers that the program has reported, unless --min-workers was given.
  void set_min_workers(int least) {
    if (options_.min_workers || names_several_programs(options_)) return;
    requirements_.min_workers = std::clamp(least, 1, requirements_.ranks);
    supervisor_info_.full_worker_count = requirements_.ranks;
  }

  /// Makes all further starts have exactly as many ranks as the saved state requires.
  void wait_for_ranks(int ranks) {
    requirements_.waits_for_ranks = true;
    requirements_.ranks = requirements_.min_workers = ranks;
  }

  int ranks_on(const Hosts& lost) const {
    return ranks_without(lost, options_, requirements_.ranks, environment, launcher_.kind);
  }
  bool are_enough_without(const Hosts& lost) const { return ranks_on(lost) >= requirements_.min_workers; }

  /// Asks the hosts of the job whether they answer, if a lost host may be the cause of this end.
  void find_lost_hosts(JobEnd& end) {
    const int times = times_to_ask_hosts(end, signals_.stop_requested());
    auto hosts = times > 0 ? other_hosts(options_, host_name()) : Hosts();
    for (const auto& host : lost_.hosts()) hosts.erase(host);
    auto unreached = lost_.ask_all(hosts);
    for (int i = 1; i < times && !hosts.empty() && unreached.empty() && wait(signals_, std::chrono::seconds(1)); ++i)
      unreached = lost_.ask_all(hosts);
    for (const auto& [host, reason] : unreached) {
      // The end has another cause, and a login may just be slow.
      if (reason.empty() && (times == 1 || end.report.failed_rank)) continue;
      lost_.add(host);
      if (!end.report.lost_host)
        end.report.launcher_error = reason.empty() ? "the node " + host + " does not answer" : reason;
      end.report.lost_host = host;
    }
  }

  /// Returns the name that --hosts has for a lost host. If --hosts has none, for example since it has addresses, asks
  /// all hosts for their names, and returns the host with this name or, if no host has it, all hosts that do not
  /// answer. If all answer, returns `lost`.
  Hosts entries_of(const std::string& lost) {
    const auto hosts = other_hosts(options_, host_name());
    if (auto name = name_in_hosts(options_, lost); hosts.empty() || hosts.contains(name)) return {std::move(name)};
    const auto unreached = lost_.ask_all(hosts);
    if (auto name = lost_.host_called(short_name(lost)); !name.empty()) return {std::move(name)};
    Hosts silent;
    for (const auto& [host, reason] : unreached) silent.insert(host);
    return silent.empty() ? Hosts{lost} : silent;
  }

  /// Determines the hosts that the next start must not use: hosts that the launcher or the ranks have lost now, and
  /// hosts lost earlier that do not answer yet. If too few ranks would fit on the others, it may use all hosts.
  void leave_out_lost_hosts(JobEnd& end) {
    if (end.report.lost_host)
      for (const auto& host : entries_of(*end.report.lost_host)) lost_.add(host);
    else if (!launcher_.kind.uses_daemons())
      find_lost_hosts(end);
    else if (end.report.launcher_error.empty())
      lost_.replace({});  // Slurm may use all nodes again; leave_out_drained_nodes() finds the exceptions
    const bool enough = are_enough_without(lost_.hosts());
    if (end.report.lost_host) end.host_is_excused = enough || requirements_.waits_for_ranks;
    if (!enough) lost_.replace({});
    leave_out_drained_nodes();
  }

  /// Adds the nodes that Slurm has drained: a running step may go on there, but new steps must not begin.
  void leave_out_drained_nodes() {
    auto out = launcher_.kind.nodes_out_of_service();
    out.insert(lost_.hosts().begin(), lost_.hosts().end());
    if (!are_enough_without(out)) return;
    for (const auto& node : out)
      if (!lost_.hosts().contains(node) && named_nodes_.insert(node).second)
        terminal_.warn("Slurm has taken the node " + node + " out of service; it is left out from now on");
    lost_.replace(std::move(out));
  }

  /// True if a lost host answers again while fewer ranks than requested run, and the job can resume from a checkpoint.
  /// The host is then no longer lost.
  bool should_grow(const LauncherReport& report, int ranks) {
    const auto answering = lost_.answering();
    const bool ends = report.leaving || report.lost_rank || report.returned_code;
    if (answering.empty() || ends) return false;
    const bool needed = ranks < requirements_.ranks;
    if (needed && (report.run.empty() || sweep::progress(report.run).empty())) return false;
    lost_.remove(answering);
    if (!needed) return false;  // spare slots have replaced the host's ranks; its own slots are spare from now on
    terminal_.add("muster: " + joined({answering.begin(), answering.end()}) +
                  (answering.size() == 1 ? " answers" : " answer") +
                  " again; the ranks save their state and start again as " +
                  detail::counted(ranks_on(lost_.hosts()), "rank") + "\n");
    return true;
  }

  int give_up(const JobEnd& end, const std::string& cause, int code) {
    run_.write_cause(terminal_);
    auto text = cause;
    if (is_failure(end, signals_.stop_requested())) {
      if (is_preemption(end))
        text +=
            str(". It is not started again: ", failures_.like(end).count,
                " preemptions since the last progress, and max_preemption_failures is ", requirements_.max_preemptions);
      else if (requirements_.max_failures > 0)
        text += str(". It is not started again: ", failures_.like(end).count,
                    " failures since the last progress, and --max-failures is ", requirements_.max_failures);
      if (const auto where = log_hint(end); !where.empty()) text += ". " + where;
    }
    terminal_.error(text);
    return code;
  }

  void find_job_end() {
    const auto now = std::chrono::system_clock::now();
    launch::job_end_warning(environment, now);  // not shown here, since the ranks print it
    time_.end = launch::end_of_allocation(environment, now);
    if (time_.end) return;
    auto asked = launch::ask_for_job_end(environment);
    if (asked.end) supervisor_info_.job_end = std::chrono::system_clock::to_time_t(*asked.end);
    const auto level = value_of("MUSTER_LOG_LEVEL");
    if (!asked.note.empty() && (level == "debug" || level == "trace"))
      terminal_.add("muster: debug: " + asked.note + "\n");
    time_.end = asked.end;
  }

  /// Queues this Slurm job again, if the user wants that. Returns true if Slurm does so.
  bool queue_again(const std::string& reason) {
    const char* const job = environment("SLURM_JOB_ID");
    if (!options_.requeue || job == nullptr) return false;
    terminal_.add("muster: " + reason + "; it is queued again\n");
    terminal_.flush();
    if (requeue(job)) return true;
    terminal_.warn(str("Slurm does not queue the job ", job, " again; submit it again"));
    return false;
  }

  void announce_first_start() {
    std::string text;
    for (const auto& [command, ranks] : programs_of(options_))
      text += (text.empty() ? "muster: starting " : ", ") +
              detail::counted(ranks.value_or(requirements_.ranks), "rank") + " of " + command[0];
    if (!options_.hosts.empty()) text += " on " + options_.hosts;
    terminal_.add(text + "\n");
    terminal_.write_some();
  }

  void announce_next_start(const JobEnd& end, const std::string& cause, const NextStart& next) {
    auto text = cause;
    if (const auto where = log_hint(end); !where.empty()) text += ". " + where;
    text += ". Starting again";
    if (next.ranks != requirements_.ranks || end.report.required_ranks)
      text += " with " + detail::counted(next.ranks, "rank");
    if (next.wait.count() > 0) text += str(" in ", next.wait.count(), " s");
    if (end.report.required_ranks)
      return terminal_.warn(text + ", as its saved state requires, once that many are available");
    const auto& failures = failures_.like(end);
    const int most = is_preemption(end) ? requirements_.max_preemptions : requirements_.max_failures;
    text += failures.furthest.empty() ? "" : " from the newest checkpoint";
    text += str(is_preemption(end) ? " (preemption " : " (failure ", failures.count);
    if (most > 0) text += str(" of ", most);
    terminal_.warn(text + ")");
  }

  /// Called when the ranks have finished their work. Reports what has happened afterwards.
  int finish_successfully(const JobEnd& end) {
    const bool was_ended = end.exceeded_grace || end.report.lost_rank || end.report.leaving;  // perhaps by this process
    if (signals_.stop_immediately())
      terminal_.warn("the work is done; after that it was interrupted");
    else if (end.code != 0 || end.launcher_signal != 0 || was_ended)
      terminal_.warn("the work is done; after that " + cause_of(end, ""));
    // A rank has printed the error, but the program has continued and ended with code 0.
    else if (!end.report.error.empty())
      terminal_.error(end.report.error);
    return 0;
  }

  int interrupted() {
    terminal_.error("interrupted; what came after the newest checkpoint is lost");
    return static_cast<int>(ExitCode::interrupted);
  }

  /// `ran`: true if ranks were stopped that had no Launch.
  int stopped_between_starts(bool ran = false) {
    run_.write_cause(terminal_);
    if (signals_.stop_immediately()) return interrupted();
    const bool saved = failures_.had_checkpoint();
    terminal_.error(saved ? "stopped on request before the next start; the newest checkpoint has the state"
                    : ran ? "stopped on request; the ranks had no Launch, which saves their state"
                    : run_.folder.empty() ? "stopped on request before the ranks had started"
                                          : "stopped on request before the next start, and there is no state saved");
    return static_cast<int>(saved ? ExitCode::stopped : ExitCode::retry);
  }

  const SuperviseOptions options_;
  const FoundLauncher launcher_;
  JobRequirements requirements_;
  SupervisorInfo supervisor_info_;
  Signals signals_;
  Terminal terminal_{signals_, STDERR_FILENO};
  TemporaryFolders folders_;
  FailureCounts failures_;
  LostHosts lost_;     ///< hosts that the next start must not use
  Hosts named_nodes_;  ///< drained nodes that a warning was given for
  ReportedRun run_;
  JobTime time_;
};

}  // namespace
}  // namespace detail::supervise

int supervise(const SuperviseOptions& options) {
  detail::launch::undo_openmp_binding();
  detail::ensure_home();
  detail::launch::forget_other_launchers(detail::comm::mpi_library(), /*even_own=*/true);
  auto limited = options;
  limited.grace = detail::usable_timeout(options.grace);
  limited.start_limit = detail::usable_timeout(options.start_limit);
  return detail::supervise::Supervision(limited).run();
}

}  // namespace muster
