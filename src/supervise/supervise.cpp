// muster run, from the command line to the exit code: start the job, watch it, interpret its end, report, start again.
#include "muster/supervise.hpp"

#include "base/cpus.hpp"
#include "base/duration.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/listed.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/run_names.hpp"
#include "base/temporary.hpp"
#include "comm/mpi_scope.hpp"
#include "launch/job_end.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"
#include "launch/supervised.hpp"
#include "muster/config.hpp"
#include "muster/error.hpp"
#include "run/failures.hpp"
#include "supervise/decision.hpp"
#include "supervise/job.hpp"
#include "supervise/lost_hosts.hpp"
#include "supervise/signals.hpp"
#include "supervise/slurm_steps.hpp"
#include "supervise/temporary_folders.hpp"
#include "supervise/terminal.hpp"
#include "sweep/progress.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <random>
#include <set>
#include <utility>

namespace muster {
namespace detail::supervise {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

const char* environment(const char* name) { return std::getenv(name); }

Launcher find_launcher(const SuperviseOptions& options) {
  Launcher launcher{.mpi = comm::mpi_library()};
  launcher.kind = launcher_kind(options, environment, launcher.mpi);
  if (launcher.kind == Launcher::Kind::srun) {
    launcher.path = find_program("srun");
    if (!launcher.path.empty()) return launcher;
    throw Error(ExitCode::missing_package, "starting the ranks", "this is a job of Slurm and there is no srun in PATH",
                "Load its module, or give --hosts");
  }
  const bool hydra = launcher.kind == Launcher::Kind::hydra;
  const std::array<std::string, 2> names{hydra ? "mpiexec.hydra" : "mpirun", "mpiexec"};
  std::vector<std::string> candidates{MUSTER_MPIEXEC, names[0], names[1]};
  if (hydra) std::swap(candidates[0], candidates[1]);  // whose name says what it is
  // The one beside the library that the ranks use is sure to fit it.
  if (const fs::path library = comm::mpi_library_file(); library.is_absolute())
    for (const auto& name : {names[1], names[0]})
      candidates.insert(candidates.begin(), (library.parent_path().parent_path() / "bin" / name).string());
  for (const auto& name : candidates)
    if (launcher.path = find_program(name); !launcher.path.empty()) return launcher;
  throw Error(ExitCode::missing_package, "starting the ranks",
              "there is no " + names[0] + ", neither " MUSTER_MPIEXEC " nor in PATH",
              "Install the programs of the MPI (Debian: openmpi-bin or mpich) or load its module");
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
          .full_worker_count = options.min_workers ? ranks : 0};
}

/// How long a launcher may take to start its daemons on other hosts, and ranks on this host to load muster's library.
constexpr std::chrono::milliseconds daemons_start_time = std::chrono::seconds(10), load_time = std::chrono::seconds(2);
/// If this process has not polled for so long, it was suspended.
constexpr std::chrono::seconds suspension(2);
/// After that time a warning says that the program goes on after its work.
constexpr std::chrono::seconds time_after_work(60);

std::string in_seconds(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::round<std::chrono::seconds>(time).count()) + " s";
}

/// One start, to its end: nothing of it is left then. `should_grow`: asked often; when it returns true, the ranks save
/// their state and stop, to be started again on more hosts.
JobEnd watch(Job& job, Launcher::Kind kind, Signals& signals, Terminal& terminal, Terminal& standard_output,
             const SuperviseOptions& options, const std::function<bool(const LauncherReport&)>& should_grow) {
  LauncherOutput output, of_standard_output(output.report());
  bool told = false;
  std::optional<Clock::time_point> stop_time, start_limit, end_of_work;
  std::optional<std::chrono::seconds> patience;
  Clock::time_point end_of_patience;
  auto load_limit = Clock::now() + options.start_limit;
  bool warned_of_start = false, warned_of_end = false;
  // Of stdout, which the ranks write to, and stderr only whether their readers have gone.
  std::array<int, 2> read_by_others{STDOUT_FILENO, STDERR_FILENO};
  // While stderr is not read, the messages wait, and in the end the ranks do.
  const auto say = [&](const char* level, const std::string& text) {
    terminal.add("muster: " + (level + text) + "\n");
  };
  JobEnd end;
  auto last = Clock::now(), next_look = last;
  while (!job.ended() && !signals.stop_immediately()) {
    const auto now = Clock::now();
    // Time in which this process did not run does not count, since the ranks did not run either, or only just do again.
    if (const auto gap = now - std::exchange(last, now); gap >= suspension) {
      for (auto* const time : {&stop_time, &start_limit, &end_of_work})
        if (*time) **time += gap;
      load_limit += gap;
      end_of_patience += gap;
      say("", "it was suspended for " + in_seconds(std::chrono::round<std::chrono::milliseconds>(gap)));
    }
    if (signals.stop_requested() && !stop_time) {
      stop_time = now;
      say("", "stopping; the ranks have " + in_seconds(options.grace) +
                  " to save their state. A second Ctrl-C ends them at once");
    }
    if (!stop_time && should_grow(output.report())) {
      stop_time = now;
      end.grows = true;
    }
    // Over several hosts a signal ends mpirun while it starts its daemons, or is lost until all ranks run. Hydra passes
    // it on to ranks that have not loaded muster's library yet. If no rank has reported for some time, their messages
    // may go elsewhere.
    const bool asks_at_once = options.hosts.empty() && kind != Launcher::Kind::hydra && Job::sees_processes();
    const auto longest_wait = std::min(options.grace / 2, options.hosts.empty() ? load_time : daemons_start_time);
    const bool may_ask = asks_at_once || output.report().up || (stop_time && now >= *stop_time + longest_wait);
    if (stop_time && !told && may_ask) told = job.ask_to_stop();
    if (now >= next_look) {
      next_look = now + std::chrono::seconds(2);
      job.end_left_behind();
    }
    if (stop_time && now >= *stop_time + options.grace) {
      end.exceeded_grace = true;
      break;
    }
    const auto& report = output.report();
    if (!report.loaded && !warned_of_start && now >= load_limit) {
      warned_of_start = true;
      say("warning: ",
          "no rank has started within " + in_seconds(options.start_limit) + ": " +
              (report.slurm.empty() ? "the launcher may wait for a host (ssh), the program for a file system"
                                    : "the last that Slurm has said is \"" + report.slurm + "\""));
    }
    if (report.starting && !start_limit) start_limit = now + options.start_limit;
    // Hydra waits for a host for ever, although ssh has said that it cannot reach it.
    const bool waits_in_vain =
        kind == Launcher::Kind::hydra && other_hosts(options, "").contains(name_in_hosts(options, report.unreachable));
    if (!report.up && (waits_in_vain || (start_limit && now >= *start_limit))) {
      end.not_up = true;
      break;
    }
    if (report.ended && !end_of_work) end_of_work = now;
    if (end_of_work && !warned_of_end && now >= *end_of_work + time_after_work) {
      warned_of_end = true;
      say("warning: ", "the ranks have finished their work and do not end; Ctrl-C ends them");
    }
    if (const auto limit = patience_with(report, kind == Launcher::Kind::srun); limit && limit != patience) {
      patience = limit;
      end_of_patience = now + *patience;
    }
    if (patience && now >= end_of_patience) break;
    const int timeout = stop_time && !told ? 10 : 100;  // ms
    // In a stop the launcher must not wait for our reader.
    const bool reads = (!terminal.is_full() && !standard_output.is_full()) || stop_time;
    std::array<pollfd, 7> sources{{{signals.descriptor(), POLLIN, 0},
                                   {reads ? job.output() : -1, POLLIN, 0},
                                   {read_by_others[0], 0, 0},
                                   {read_by_others[1], 0, 0},
                                   terminal.source(),
                                   {reads ? job.standard_output() : -1, POLLIN, 0},
                                   standard_output.source()}};
    ::poll(sources.data(), sources.size(), timeout);
    signals.take();
    if (signals.take_suspension()) {
      if (job.suspend()) {
        signals.suspend();
        job.resume();
      } else {
        say("warning: ", "ranks on other hosts, or without /proc, cannot be suspended; Ctrl-Z is ignored");
      }
    }
    for (std::size_t i = 0; i < read_by_others.size(); ++i) {
      const auto events = sources[i + 2].revents;
      if ((events & (POLLERR | POLLNVAL)) == 0) continue;
      read_by_others[i] = -1;
      if ((events & POLLNVAL) != 0) continue;  // it is closed, and polling it again would spin
      say("warning: ", std::string("nobody reads standard ") + (i == 0 ? "output" : "error") +
                           " any more, to which the ranks write");
      signals.request_stop();
    }
    if (reads) {
      terminal.add(output.take(job.read()));
      standard_output.add(of_standard_output.take(job.read_standard_output()));
    }
    terminal.write_some();
    standard_output.write_some();
  }
  end.code = job.code();
  end.launcher_signal = job.signal();
  end.stop_requested = signals.stop_requested();
  end.had_ranks = job.had_ranks();
  const bool ended_by_itself = job.ended();
  job.end();
  terminal.add(output.take(job.read()));
  terminal.add(output.finish());
  standard_output.add(of_standard_output.take(job.read_standard_output()));
  standard_output.add(of_standard_output.finish());
  terminal.flush();
  standard_output.flush();
  end.report = output.report();
  if (end.report.failed_rank && end.report.failed_host.empty() && options.hosts.empty() && kind != Launcher::Kind::srun)
    end.report.failed_host = host_name();
  if (end.report.exit_code) end.code = *end.report.exit_code;  // srun's own may be another rank's
  if (!ended_by_itself && end.report.leaving) end.code = *end.report.leaving;
  if (!ended_by_itself && end.report.returned_code) end.code = *end.report.returned_code;
  // Hydra that has passed on a signal may end with 0, whatever the ranks' codes.
  if (kind == Launcher::Kind::hydra && told && end.code == 0) end.code = end.report.returned_code.value_or(0);
  if (!options.hosts.empty() && is_unfinished(end)) end.code = static_cast<int>(ExitCode::retry);
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
    auto text = read_file(fs::path(report.run) / run_names::error, 1 << 20);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  } catch (const Error& error) {
    return std::string("the ranks have left a cause that cannot be read: ") + error.what();
  }
}

/// A limit from the run's saved options, or in a sweep from its first trial's; empty if the run did not save any.
std::optional<int> saved_limit(const fs::path& run, const char* limit) {
  for (const auto& folder : {run, run / sweep::first_trial}) try {
      return read_json(folder / run_names::params).at("run_config").at(limit).get<int>();
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
    if (signals.take_suspension()) signals.suspend();
  }
  return false;
}

/// The supervision of a job. Many members: what its starts have in common, and what the starts so far have shown.
class Supervision {
 public:
  explicit Supervision(const SuperviseOptions& given)
      : options_(with_hosts_of_job(given, environment)),
        launcher_(find_launcher(options_)),
        requirements_{.ranks = wanted_ranks(options_, environment, count_usable_cores()), .max_failures = 0},
        // A node that a Slurm job has lost does not come back to it.
        lost_(launcher_.kind == Launcher::Kind::srun ? std::vector<std::string>() : login_program(environment)) {
    const auto& options = options_;
    check(options, requirements_.ranks, all_slots(options, environment, count_usable_cores()), environment);
    requirements_.min_workers = options.min_workers.value_or(requirements_.ranks);
    supervisor_info_ = make_supervisor_info(options, requirements_.ranks);
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
    if (launcher_.kind != Launcher::Kind::srun && options.hosts.empty() && find_program(options.command[0]).empty()) {
      const auto& program = options.command[0];
      const bool there = program.find('/') != std::string::npos && fs::exists(status_of(program));
      throw Error(ExitCode::usage, "starting " + program,
                  there ? "it is not a file that may be executed" : "there is no such program",
                  there ? "Look at its mode, or name another" : "Give the path of one, as in ./fit");
    }
  }

  int run() {
    const int code = run_job();
    if (code == static_cast<int>(ExitCode::stopped) && time_is_over()) queue_again("the job's time is over");
    return code;
  }

 private:
  int run_job() {
    announce_first_start();
    for (int ranks = requirements_.ranks;;) {
      auto end = start(ranks);
      if (signals_.stop_immediately() && end.report.returned_code != 0) return interrupted();
      if (!end.report.run.empty()) run_ = end.report.run;
      if (end.report.min_workers) set_min_workers(*end.report.min_workers);
      const int code = exit_code_of(end);
      if (end.stop_requested && !has_started(end) && !end.report.no_program)
        return stopped_between_starts(end.had_ranks);
      if (code == 0) return finish_successfully(end);
      if (end.grows && code == static_cast<int>(ExitCode::stopped) && !signals_.stop_requested()) {
        ranks = ranks_on(lost_.hosts());
        continue;
      }
      leave_out_lost_hosts(end);
      const auto cause = cause_of(end, read_kept_cause(end.report));
      if (is_failure(end, signals_.stop_requested()))
        is_preemption(end) ? count_preemption() : count(exit_code_of(end));
      auto next = decide(end, counted_failures(end), requirements_, ranks, signals_.stop_requested());
      if (end.report.lost_host) next.ranks = requirements_.ranks;
      if (!lost_.hosts().empty()) next.ranks = std::min(next.ranks, ranks_on(lost_.hosts()));
      // A failed node has left the job for good; queued again, the job gets all its nodes.
      if (end.report.lost_host && !end.host_is_excused && launcher_.kind == Launcher::Kind::srun &&
          queue_again(cause + ". Too few nodes of the job are left"))
        return static_cast<int>(ExitCode::retry);
      // A killed rank cannot write its cause itself.
      if (end.report.lost_rank || end.launcher_signal != 0 || end.exceeded_grace) cause_to_keep_ = cause;
      if (!next.again) return give_up(end, cause, next.code);
      if (run_is_gone()) {
        terminal_.error(cause + ". It is not started again: the run's folder " + run_.string() +
                        " was moved away or removed. Start again with the --storage and --name of the folder");
        return static_cast<int>(ExitCode::usage);
      }
      if (is_finished_again(end)) {
        terminal_.error(cause + ". It is not started again: two starts in a row were lost when the run " +
                        run_.string() + " was finished, and began no other run");
        return next.code;
      }
      announce_next_start(end, cause, next);
      if (end.report.required_ranks) wait_for_ranks(next.ranks);
      if (!wait(signals_, next.wait)) return stopped_between_starts();
      ranks = next.ranks;
    }
  }

  /// True if the run's folder is not there any more, so that a new start would begin a new run. Only where all ranks
  /// are on this host: the storage of other hosts need not be visible here.
  bool run_is_gone() const {
    const bool is_local = launcher_.kind != Launcher::Kind::srun && options_.hosts.empty();
    return is_local && !run_.empty() && !fs::exists(status_of(run_)) && fs::exists(status_of(run_.parent_path()));
  }

  /// True if this start and the one before were both lost when the same run was finished, so that another start would
  /// find nothing to do. After the first loss there may be: another run of the program, or more epochs of this one.
  bool is_finished_again(const JobEnd& end) {
    if (end.report.run.empty()) return false;  // it was lost before it came that far
    const auto before = std::exchange(finished_run_, run_is_finished() ? run_ : fs::path());
    return !before.empty() && before == finished_run_;
  }

  /// True if training has ended well. In the folder of a sweep the run is another one, which follows.
  bool run_is_finished() const {
    try {
      return !run_.empty() && !fs::exists(status_of(run_ / run_names::sweep)) &&
             read_json(run_ / run_names::params).value("finished", false);
    } catch (const std::exception&) {
      return false;  // it has not been written yet, or is on the storage of another host
    }
  }

  JobEnd start(int ranks) {
    JobEnd end;
    supervisor_info_.used = std::chrono::floor<std::chrono::seconds>(Clock::now() - begin_);
    auto command = launch_command(launcher_, options_, ranks, lost_.hosts(), supervisor_info_, folders_.paths(),
                                  environment, flag_variables());
    // Slurm keeps the step of a lost node until it has noticed the loss, and srun would wait for the CPUs of that step.
    if (!sruns_.empty() && !end_steps(sruns_, host_name())) command.environment.emplace_back("SLURM_OVERLAP", "1");
    {
      Job job(command, launcher_.kind, /*has_remote_ranks=*/!other_hosts(options_, host_name()).empty());
      if (launcher_.kind == Launcher::Kind::srun) sruns_.insert(job.launcher());
      keep_cause();  // which the ranks need not wait for
      end = watch(job, launcher_.kind, signals_, terminal_, standard_output_, options_,
                  [&](const LauncherReport& report) { return should_grow(report, ranks); });
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
      terminal_.warn(std::string("the number of failures is not kept in the run's folder: ") + error.what());
    }
  }

  void keep_cause() {
    const auto cause = std::exchange(cause_to_keep_, {});
    if (run_.empty() || cause.empty()) return;
    try {
      write_file(run_ / run_names::error, cause + "\n");
    } catch (const Error& error) {
      terminal_.warn(std::string("the cause of the failure is not kept: ") + error.what());
    }
  }

  int ranks_on(const Hosts& lost) const {
    return ranks_without(lost, options_, requirements_.ranks, environment, launcher_.kind);
  }
  bool are_enough_without(const Hosts& lost) const { return ranks_on(lost) >= requirements_.min_workers; }

  /// Asks the hosts of the job whether they answer, if the loss of one may be the cause of this end.
  void find_lost_hosts(JobEnd& end) {
    const int times = times_to_ask_hosts(end, signals_.stop_requested());
    auto hosts = times > 0 ? other_hosts(options_, host_name()) : Hosts();
    for (const auto& host : lost_.hosts()) hosts.erase(host);
    auto unreached = lost_.ask_all(hosts);
    for (int i = 1; i < times && !hosts.empty() && unreached.empty() && wait(signals_, std::chrono::seconds(1)); ++i)
      unreached = lost_.ask_all(hosts);
    for (const auto& [host, reason] : unreached) {
      if (reason.empty() && times == 1) continue;  // the end has a cause, and a login may take long
      lost_.add(host);
      if (!end.report.lost_host)
        end.report.launcher_error = reason.empty() ? "the node " + host + " does not answer" : reason;
      end.report.lost_host = host;
    }
  }

  /// What --hosts calls a lost host. If it names it otherwise, as by an address, all hosts are asked for their names:
  /// it is the one that has that name, or one of those that do not answer.
  Hosts entries_of(const std::string& lost) {
    const auto hosts = other_hosts(options_, host_name());
    if (auto name = name_in_hosts(options_, lost); hosts.empty() || hosts.contains(name)) return {std::move(name)};
    const auto unreached = lost_.ask_all(hosts);
    if (auto name = lost_.host_called(short_name(lost)); !name.empty()) return {std::move(name)};
    Hosts silent;
    for (const auto& [host, reason] : unreached) silent.insert(host);
    return silent.empty() ? Hosts{lost} : silent;
  }

  /// The hosts that the next start leaves out, if enough ranks fit on the others: those that the launcher or the ranks
  /// have lost, and those lost before that do not answer yet.
  void leave_out_lost_hosts(JobEnd& end) {
    if (end.report.lost_host)
      for (const auto& host : entries_of(*end.report.lost_host)) lost_.add(host);
    else if (launcher_.kind != Launcher::Kind::srun)
      find_lost_hosts(end);
    else if (end.report.launcher_error.empty())
      lost_.replace({});  // Slurm could use them all; it says below which it has lost meanwhile
    const bool enough = are_enough_without(lost_.hosts());
    if (end.report.lost_host) end.host_is_excused = enough || waits_for_ranks_;
    if (!enough) lost_.replace({});
    if (launcher_.kind == Launcher::Kind::srun) leave_out_drained_nodes();
  }

  /// Where a node is drained, Slurm lets the step that runs there go on, but wants no new one.
  void leave_out_drained_nodes() {
    auto out = nodes_out_of_service();
    out.insert(lost_.hosts().begin(), lost_.hosts().end());
    if (!are_enough_without(out)) return;
    for (const auto& node : out)
      if (!lost_.hosts().contains(node) && named_nodes_.insert(node).second)
        terminal_.warn("Slurm has taken the node " + node + " out of service; it is left out from now on");
    lost_.replace(std::move(out));
  }

  /// True if a lost host answers again, and the ranks, which are fewer than they should be, can go on from a
  /// checkpoint.
  bool should_grow(const LauncherReport& report, int ranks) {
    const auto answering = lost_.answering();
    const bool ends = report.leaving || report.lost_rank || report.returned_code;
    if (answering.empty() || ends) return false;
    const bool needed = ranks < requirements_.ranks;
    if (needed && (report.run.empty() || sweep::progress(report.run).empty())) return false;
    lost_.remove(answering);
    if (!needed) return false;  // spares have its ranks, and its slots are spare from now on
    terminal_.add("muster: " + joined({answering.begin(), answering.end()}) +
                  (answering.size() == 1 ? " answers" : " answer") +
                  " again; the ranks save their state and start again as " +
                  detail::counted(ranks_on(lost_.hosts()), "rank") + "\n");
    return true;
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
    terminal_.error(text);
    return code;
  }

  void find_job_end() {
    const auto now = std::chrono::system_clock::now();
    launch::job_end_warning(environment, now);  // the ranks print it
    job_end_ = launch::end_of_allocation(environment, now);
    if (job_end_) return;
    auto asked = launch::ask_for_job_end(environment);
    if (asked.end) supervisor_info_.job_end = std::chrono::system_clock::to_time_t(*asked.end);
    const char* const level = environment("MUSTER_LOG_LEVEL");
    if (!asked.note.empty() && level != nullptr && (level == std::string("debug") || level == std::string("trace")))
      terminal_.add("muster: debug: " + asked.note + "\n");
    job_end_ = asked.end;
  }

  /// True if the ranks were told that the job ends, or have stopped by themselves shortly before its end.
  bool time_is_over() const {
    if (signals_.stop_requested() || !job_end_) return signals_.time_is_over();
    const char* const variable = environment("SLURM_JOB_START_TIME");
    const auto now = std::chrono::system_clock::now();
    const auto begin = variable ? std::chrono::system_clock::from_time_t(std::atoll(variable))
                                : now - std::chrono::round<std::chrono::seconds>(Clock::now() - begin_);
    return *job_end_ - now < (*job_end_ - begin) / 10;
  }

  /// Queues this job of Slurm again, if that is asked for; returns whether Slurm does so.
  bool queue_again(const std::string& reason) {
    const char* const job = environment("SLURM_JOB_ID");
    if (!options_.requeue || job == nullptr) return false;
    terminal_.add("muster: " + reason + "; it is queued again\n");
    terminal_.flush();
    if (requeue(job)) return true;
    terminal_.warn("Slurm does not queue the job " + std::string(job) + " again; submit it again");
    return false;
  }

  void announce_first_start() {
    auto text = "muster: starting " + detail::counted(requirements_.ranks, "rank") + " of " + options_.command[0];
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
    if (next.wait.count() > 0) text += " in " + std::to_string(next.wait.count()) + " s";
    if (end.report.required_ranks)
      return terminal_.warn(text + ", as its saved state requires, once that many are available");
    const auto& failures = counted_failures(end);
    const int most = is_preemption(end) ? requirements_.max_preemptions : requirements_.max_failures;
    text += failures.furthest.empty() ? "" : " from the newest checkpoint";
    text += (is_preemption(end) ? " (preemption " : " (failure ") + std::to_string(failures.count);
    if (most > 0) text += " of " + std::to_string(most);
    terminal_.warn(text + ")");
  }

  /// The ranks had finished their work; reports what happened after it.
  int finish_successfully(const JobEnd& end) {
    const bool was_ended = end.exceeded_grace || end.report.lost_rank || end.report.leaving;  // maybe by us
    if (signals_.stop_immediately())
      terminal_.warn("the work is done; after that it was interrupted");
    else if (end.code != 0 || end.launcher_signal != 0 || was_ended)
      terminal_.warn("the work is done; after that " + cause_of(end, ""));
    else if (!end.report.error.empty())  // printed by a program that went on and ended with code 0
      terminal_.error(end.report.error);
    return 0;
  }

  int interrupted() {
    terminal_.error("interrupted; what came after the newest checkpoint is lost");
    return static_cast<int>(ExitCode::interrupted);
  }

  /// `ran`: ranks that have not loaded muster's library were stopped.
  int stopped_between_starts(bool ran = false) {
    keep_cause();
    if (signals_.stop_immediately()) return interrupted();
    const bool saved = !failures_.furthest.empty() || !preemptions_.furthest.empty();
    terminal_.error(saved          ? "stopped on request before the next start; the newest checkpoint has the state"
                    : ran          ? "stopped on request; the ranks had not loaded muster, which saves their state"
                    : run_.empty() ? "stopped on request before the ranks had started"
                                   : "stopped on request before the next start, and there is no state saved");
    return static_cast<int>(saved ? ExitCode::stopped : ExitCode::retry);
  }

  const SuperviseOptions options_;
  Launcher launcher_;
  JobRequirements requirements_;
  SupervisorInfo supervisor_info_;
  const Clock::time_point begin_ = Clock::now();
  Signals signals_;
  Terminal terminal_{signals_, STDERR_FILENO};
  Terminal standard_output_{signals_, STDOUT_FILENO};  ///< for what comes through the launcher
  TemporaryFolders folders_;
  run::Failures failures_;        ///< of this muster run, without preemptions
  run::Failures preemptions_;     ///< of this muster run
  LostHosts lost_;                ///< hosts that the next start leaves out
  Hosts named_nodes_;             ///< drained nodes that a warning has named
  std::set<pid_t> sruns_;         ///< of all starts
  bool waits_for_ranks_ = false;  ///< true if the saved state requires all requested ranks
  std::string cause_to_keep_;     ///< the cause still to be written to the run's error.txt
  launch::JobEndTime job_end_;    ///< of the batch job; none if it is not known
  fs::path run_;                  ///< the run's folder, once a rank has reported it
  fs::path finished_run_;         ///< run_, if it was finished when the start before was lost
};

}  // namespace
}  // namespace detail::supervise

int supervise(const SuperviseOptions& options) {
  detail::launch::undo_openmp_binding();
  detail::require_home();
  detail::launch::forget_other_launchers(detail::comm::mpi_library(), /*even_own=*/true);
  auto limited = options;
  limited.grace = detail::usable_limit(options.grace);
  limited.start_limit = detail::usable_limit(options.start_limit);
  return detail::supervise::Supervision(limited).run();
}

}  // namespace muster
