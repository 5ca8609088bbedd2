// The signals that `muster run` receives: requests to stop or to be suspended, and that a child has ended.
#pragma once

#include <signal.h>

#include <array>
#include <utility>

namespace muster::detail::supervise {

/// While it lives, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are wishes, though who has started this process may
/// have blocked them, and SIGTSTP (Ctrl-Z) one to be suspended. A SIGHUP that was ignored before (nohup) stays so.
/// SIGPIPE is ignored: a reader that has gone is a wish to stop, too. One object at a time.
class Signals {
 public:
  Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  ~Signals();

  /// For poll(): readable when a signal has come; take() then reads it.
  int descriptor() const noexcept;
  void take();

  bool stop_requested() const noexcept { return stop_requested_; }
  /// True once for each SIGTSTP.
  bool take_suspension() noexcept { return std::exchange(suspension_requested_, false); }
  /// Stops this process until SIGCONT, as Ctrl-Z does where nobody handles it: not at all if no shell could let it go
  /// on (an orphaned process group).
  void suspend() noexcept;
  /// True if the first wish was SIGUSR1, by which a batch system announces the end of the job's time.
  bool time_is_over() const noexcept { return first_wish_ == SIGUSR1; }
  /// Acts as if a signal had come.
  void request_stop() noexcept { stop_requested_ = true; }
  /// True after a second SIGINT.
  bool stop_immediately() const noexcept { return interrupts_ > 1; }

 private:
  static constexpr std::array<int, 7> handled{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGTSTP};

  std::array<struct sigaction, handled.size()> before_{};
  struct sigaction pipe_before_ {};
  sigset_t blocked_before_{};
  bool stop_requested_ = false, suspension_requested_ = false;
  int first_wish_ = 0;
  int interrupts_ = 0;
};

}  // namespace muster::detail::supervise
