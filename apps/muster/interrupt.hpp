// Ctrl-C while a file is being written: the work ends at a point where it can clean up.
#pragma once

#include <csignal>

namespace muster::tool {

/// Thrown to end a program that a signal has stopped.
struct Interrupted {
  int exit_code;
  const char* remains;  ///< what remains of its work, for the message
};

/// While it lives, the first SIGINT or SIGTERM is noted, and the second ends the process as usual.
class InterruptGuard {
 public:
  /// `restarts_calls`: a system call that waits goes on after a signal; otherwise it fails with EINTR.
  explicit InterruptGuard(bool restarts_calls = true);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// True if a signal has come.
  static bool has_come();
  /// Throws Interrupted if a signal has come.
  void check(const char* remains = "nothing was written") const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

}  // namespace muster::tool
