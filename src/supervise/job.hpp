// One start of the job as processes: the launcher, the ranks under it, and what they have started.
#pragma once

#include "supervise/launch_command.hpp"

#include <sys/types.h>

#include <optional>
#include <string>

namespace muster::detail::supervise {

/// The launcher has a session of its own, so that what a terminal sends reaches only this process, and is killed when
/// this process ends in whatever way. All that is orphaned under it becomes a child of this process: nothing is left
/// when the job is gone.
class Job {
 public:
  /// Starts the launcher. An Error (ExitCode::retry) where there can be no more processes.
  Job(const LaunchCommand& command, Launcher::Kind kind, bool has_remote_ranks = false);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  /// Ends what is still there.
  ~Job() {
    end();
    close_output();
  }

  /// Its stderr, to be polled; -1 when nobody writes there any more.
  int output() const noexcept { return output_; }
  /// What can be read of it now.
  std::string read();
  /// Whether the launcher has ended by itself. SIGCHLD says when to look.
  bool ended();
  /// Its exit code, or 0 and the signal that has ended it.
  int code() const noexcept;
  int signal() const noexcept;
  /// Asks the ranks to save and stop; false where there are none yet. Where /proc does not show them, it asks anyway.
  bool ask_to_stop();
  /// Kills everything, at once, and waits until it is gone.
  void end();

 private:
  void close_output() noexcept;

  pid_t launcher_ = -1;
  Launcher::Kind kind_;
  bool has_remote_ranks_;  ///< mpirun has daemons on other hosts
  int output_ = -1;
  std::optional<int> status_ = {};
};

/// An executable file of that name in PATH, or the name itself where it has a slash; empty if there is none.
std::filesystem::path find_program(const std::string& name);

}  // namespace muster::detail::supervise
