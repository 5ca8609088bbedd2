#include "supervise/watch.hpp"

#include "base/host.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"
#include "supervise/launch_command.hpp"
#include "supervise/launcher_output.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::supervise {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a launcher may take to start its daemons on other hosts, and how long ranks on this host may take to load
/// muster's library.
constexpr std::chrono::milliseconds daemons_start_time = std::chrono::seconds(10), load_time = std::chrono::seconds(2);
/// If this process has not polled for this long, it was suspended.
constexpr std::chrono::seconds suspension(2);
/// After this time, a warning says that the program still runs although its work is finished.
constexpr std::chrono::seconds time_after_work(60);

std::string in_seconds(std::chrono::milliseconds time) {
  return str(std::chrono::round<std::chrono::seconds>(time).count(), " s");
}

}  // namespace

JobEnd watch(Job& job, const Launcher& launcher, Signals& signals, Terminal& terminal, const SuperviseOptions& options,
             const std::function<bool(const LauncherReport&)>& should_grow) {
  LauncherOutput output, of_standard_output(output.report());
  Terminal standard_output(signals, STDOUT_FILENO);  // for output that comes through the launcher
  bool told = false;
  std::optional<Clock::time_point> stop_time, start_limit, end_of_work;
  std::optional<std::chrono::seconds> patience;
  Clock::time_point end_of_patience;
  auto load_limit = Clock::now() + options.start_limit;
  bool warned_of_start = false, warned_of_end = false;
  // The ranks write to stdout and stderr themselves; here both are only polled to learn whether their readers are gone.
  std::array<int, 2> read_by_others{STDOUT_FILENO, STDERR_FILENO};
  // Adds a message like output of the ranks. If nobody reads stderr, it waits, and in the end the ranks wait, too.
  const auto say = [&](const char* level, const std::string& text) {
    terminal.add("muster: " + (level + text) + "\n");
  };
  JobEnd end;
  auto last = Clock::now(), next_look = last;
  while (!job.ended() && !signals.stop_immediately()) {
    const auto now = Clock::now();
    // Leave out the time in which this process was suspended, since the ranks were suspended, too.
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
    // With several hosts, a signal would end mpirun while it starts its daemons, or would be lost until all ranks run.
    // So wait until the ranks have reported; but not forever, since their messages may go elsewhere.
    const bool asks_at_once = options.hosts.empty() && !launcher.signals_early && Job::sees_processes();
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
    const bool waits_in_vain =
        launcher.waits_for_hosts && other_hosts(options, "").contains(name_in_hosts(options, report.unreachable));
    if (!report.up && (waits_in_vain || (start_limit && now >= *start_limit))) {
      end.not_up = true;
      break;
    }
    if (report.ended && !end_of_work) end_of_work = now;
    if (end_of_work && !warned_of_end && now >= *end_of_work + time_after_work) {
      warned_of_end = true;
      say("warning: ", "the ranks have finished their work and do not end; Ctrl-C ends them");
    }
    if (const auto limit = launcher.patience(report); limit && limit != patience) {
      patience = limit;
      end_of_patience = now + *patience;
    }
    if (patience && now >= end_of_patience) break;
    const int timeout = stop_time && !told ? 10 : 100;  // ms
    // While the job stops, read in any case, so that the launcher need not wait for our reader.
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
      if ((events & POLLNVAL) != 0) continue;  // the file is closed; polling it again would return at once
      say("warning: ",
          str("nobody reads standard ", i == 0 ? "output" : "error", " any more, to which the ranks write"));
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
  if (end.report.failed_rank && end.report.failed_host.empty() && options.hosts.empty() && !launcher.uses_daemons())
    end.report.failed_host = host_name();
  if (end.report.exit_code) end.code = *end.report.exit_code;  // srun's own code may be that of another rank
  if (!ended_by_itself && end.report.leaving) end.code = *end.report.leaving;
  if (!ended_by_itself && end.report.returned_code) end.code = *end.report.returned_code;
  if (launcher.loses_codes && told && end.code == 0) end.code = end.report.returned_code.value_or(end.report.told_code);
  // Of several programs, those that train on a part of the ranks do not report that they have finished.
  if (!options.hosts.empty() && !names_several_programs(options) && is_unfinished(end))
    end.code = static_cast<int>(ExitCode::retry);
  // A node was lost silently: the launcher's daemon there does not report it, but the other ranks have noticed.
  if (end.report.silent && !end.report.lost_host && (end.report.leaving || !ended_by_itself)) {
    end.report.lost_host = end.report.silent;
    end.report.keep_error("the node " + *end.report.silent + " does not answer");
  }
  return end;
}

}  // namespace muster::detail::supervise
