// One start of the job as processes: the launcher, the ranks under it, and the processes that they have started.
#pragma once

#include "supervise/launch_command.hpp"

#include <sys/types.h>

#include <optional>
#include <string>

namespace muster::detail::supervise {

/// The launcher gets its own session, so that a terminal's signals reach only this process. It is killed when this
/// process ends, for whatever reason. Processes that are orphaned under it become children of this process, so that
/// none is left when the job is gone.
class Job {
 public:
  /// Starts the launcher. An Error (ExitCode::retry) where there can be no more processes.
  Job(const LaunchCommand& command, const Launcher& launcher, bool has_remote_ranks = false);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  /// Ends all processes that are left.
  ~Job() {
    end();
    close(output_);
    close(standard_output_);
  }

  pid_t process() const noexcept { return process_; }
  /// The launcher's stderr, for poll(); -1 when no process writes to it any more.
  int output() const noexcept { return output_; }
  /// Reads what is available of it now.
  std::string read() { return read(output_); }
  /// The launcher's stdout where the ranks' comes through it, with what it says of lost ranks; -1 where it is ours.
  int standard_output() const noexcept { return standard_output_; }
  std::string read_standard_output() { return read(standard_output_); }
  /// True if the launcher has ended by itself. SIGCHLD announces this.
  bool ended();
  /// Its exit code; or 0, and the signal that has ended it.
  int code() const noexcept;
  int signal() const noexcept;
  /// True if this machine's /proc shows the processes of the job. It may be missing, empty, or that of another
  /// container.
  static bool sees_processes() noexcept;
  /// Asks the ranks to save and stop. Returns false if there are none yet. If it does not see them it always asks, and
  /// ranks that are not there yet do not hear it.
  bool ask_to_stop();
  /// To be called every two seconds. Ends processes that the ranks have left when they ended, by whose open streams the
  /// launcher is kept waiting: it reads the ranks' output to its end. Does nothing where ranks are elsewhere, and
  /// without /proc.
  void end_left_behind();
  /// True if end_left_behind() or ask_to_stop() has seen ranks.
  bool had_ranks() const noexcept { return had_ranks_; }
  /// Stops all processes of the job, as Ctrl-Z does. Returns false, and does nothing, if it does not see all of
  /// them.
  bool suspend() const;
  void resume() const;
  /// Kills everything at once, and waits until it is gone.
  void end();

 private:
  static std::string read(int& source);
  static void close(int& file) noexcept;

  const Launcher& launcher_;
  pid_t process_ = -1;        ///< the launcher's
  bool ranks_are_elsewhere_;  ///< on other hosts, or below a batch system's daemons
  int output_ = -1;
  int standard_output_ = -1;
  std::optional<int> status_ = {};
  bool had_ranks_ = false;
  int calls_without_ranks_ = 0;
};

}  // namespace muster::detail::supervise
