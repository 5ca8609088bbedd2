// The signals that `muster run` receives: requests to stop or to suspend, and the news that a child has ended.
#pragma once

#include <signal.h>

#include <array>
#include <utility>

namespace muster::detail::supervise {

/// While this object lives, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are requests to stop, and SIGTSTP (Ctrl-Z) is
/// a request to suspend, even if the parent process has blocked these signals. If SIGHUP (as by nohup) or SIGTSTP was
/// ignored before, it still is. SIGPIPE is ignored; a reader that is gone is noticed otherwise and counts as a request
/// to stop. At most one such object may live at a time.
class Signals {
 public:
  Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  ~Signals();

  /// For poll(): readable when a signal has come. take() reads the signals.
  int descriptor() const noexcept;
  void take();

  bool stop_requested() const noexcept { return stop_requested_; }
  /// True if a SIGTSTP has come since the last call.
  bool take_suspension() noexcept { return std::exchange(suspension_requested_, false); }
  /// Stops this process until SIGCONT, as Ctrl-Z does by default. If no shell could continue the process (an orphaned
  /// process group), does nothing.
  void suspend() noexcept;
  /// True if the first request was SIGUSR1, by which a batch system announces that the job's time is nearly over.
  bool time_is_over() const noexcept { return first_request_ == SIGUSR1; }
  /// Acts as if a request to stop had come.
  void request_stop() noexcept { stop_requested_ = true; }
  /// True after the second SIGINT.
  bool stop_immediately() const noexcept { return interrupts_ > 1; }

 private:
  static constexpr std::array<int, 7> handled{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGTSTP};

  std::array<struct sigaction, handled.size()> before_{};
  struct sigaction pipe_before_ {};
  sigset_t blocked_before_{};
  bool stop_requested_ = false, suspension_requested_ = false;
  int first_request_ = 0;
  int interrupts_ = 0;
};

}  // namespace muster::detail::supervise
