// The processes of one start of the job: the launcher, the ranks below it, and the processes that they have started.
#pragma once

#include "supervise/launch_command.hpp"

#include <sys/types.h>

#include <optional>
#include <string>

namespace muster::detail::supervise {

/// Starts the launcher in a session of its own, so that the terminal's signals reach only this process. The launcher is
/// killed when this process ends, for whatever reason. Orphans of the job become children of this process, so that it
/// can end them all.
class Job {
 public:
  /// Starts the launcher. Throws an Error (ExitCode::retry) if no process can be started.
  Job(const LaunchCommand& command, const Launcher& launcher, bool has_remote_ranks = false);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  /// Ends all processes of the job that are left.
  ~Job() {
    end();
    close(output_);
    close(standard_output_);
  }

  pid_t process() const noexcept { return process_; }
  /// The launcher's stderr, for poll(); -1 when no process can write to it any more.
  int output() const noexcept { return output_; }
  /// Returns what can be read from the launcher's stderr now.
  std::string read() { return read(output_); }
  /// The launcher's stdout, if the ranks' output and messages about lost ranks come through it; -1 if the launcher
  /// writes to our stdout directly.
  int standard_output() const noexcept { return standard_output_; }
  std::string read_standard_output() { return read(standard_output_); }
  /// True if the launcher has ended. SIGCHLD announces its end.
  bool ended();
  /// Return the launcher's exit code, and the signal that has ended it. At least one of the two is 0.
  int code() const noexcept;
  int signal() const noexcept;
  /// True if /proc shows the processes of the job. It may be missing, empty, or the /proc of another container.
  static bool sees_processes() noexcept;
  /// Asks the ranks to save and stop. Returns false if it sees that there are no ranks yet. If it cannot see the ranks,
  /// it asks in any case, and ranks that have not started yet do not notice.
  bool ask_to_stop();
  /// Call it every two seconds. The launcher reads the ranks' output to its end, so a process that a rank has left
  /// behind with an open output keeps the launcher waiting. This function ends such processes. Does nothing if ranks
  /// are elsewhere, or without /proc.
  void end_left_behind();
  /// True if end_left_behind() or ask_to_stop() has seen a rank.
  bool had_ranks() const noexcept { return had_ranks_; }
  /// Stops all processes of the job, as Ctrl-Z does. If it cannot see all of them, does nothing and returns false.
  bool suspend() const;
  void resume() const;
  /// Kills all processes of the job, if need be through the launcher, and waits for their end; some seconds at most.
  void end();

 private:
  static std::string read(int& source);
  static void close(int& file) noexcept;

  const Launcher& launcher_;
  pid_t process_ = -1;        ///< of the launcher
  bool ranks_are_elsewhere_;  ///< true if ranks are on other hosts, or are children of a batch system's daemons
  int output_ = -1;
  int standard_output_ = -1;
  std::optional<int> status_ = {};
  bool had_ranks_ = false;
  int calls_without_ranks_ = 0;
};

}  // namespace muster::detail::supervise
