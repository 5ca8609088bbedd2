// The signals that `muster run` receives: requests to stop, and that a child has ended.
#pragma once

#include <signal.h>

#include <array>

namespace muster::detail::supervise {

/// While it lives, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are requests to stop, even if the parent process had
/// blocked them. A SIGHUP that was ignored before (nohup) stays ignored. Only one object at a time.
class Signals {
 public:
  Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  ~Signals();

  /// For poll(): readable when a signal has come; take() then reads it.
  int descriptor() const noexcept;
  void take();

  bool stop_wished() const noexcept { return stop_wished_; }
  /// Acts as if a signal had come.
  void wish_to_stop() noexcept { stop_wished_ = true; }
  /// True after a second SIGINT.
  bool at_once() const noexcept { return interrupts_ > 1; }

 private:
  static constexpr std::array<int, 6> handled{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD};

  std::array<struct sigaction, handled.size()> before_{};
  sigset_t blocked_before_{};
  bool stop_wished_ = false;
  int interrupts_ = 0;
};

}  // namespace muster::detail::supervise
