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
  Job(const LaunchCommand& command, Launcher::Kind kind, bool has_remote_ranks = false);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  /// Ends all processes that are left.
  ~Job() {
    end();
    close_output();
  }

  pid_t launcher() const noexcept { return launcher_; }
  /// The launcher's stderr, for poll(); -1 when no process writes to it any more.
  int output() const noexcept { return output_; }
  /// Reads what is available of it now.
  std::string read();
  /// True if the launcher has ended by itself. SIGCHLD announces this.
  bool ended();
  /// Its exit code; or 0, and the signal that has ended it.
  int code() const noexcept;
  int signal() const noexcept;
  /// Asks the ranks to save and stop. Returns false if there are none yet; without /proc it always asks.
  bool ask_to_stop();
  /// Kills everything at once, and waits until it is gone.
  void end();

 private:
  void close_output() noexcept;

  pid_t launcher_ = -1;
  Launcher::Kind kind_;
  bool has_remote_ranks_;  ///< mpirun has daemons on other hosts
  int output_ = -1;
  std::optional<int> status_ = {};
};

/// Finds an executable file of that name in PATH, or the file itself if the name has a slash; empty if there is none.
std::filesystem::path find_program(const std::string& name);

}  // namespace muster::detail::supervise
