// Ctrl-C while a file is being written: the work ends at a point where it can remove what it has begun.
#pragma once

#include <csignal>

namespace muster::tool {

/// Thrown when a signal has asked this program to end. The program then exits with `exit_code`.
struct Interrupted {
  int exit_code;
  const char* remains;  ///< says for the message what is left of the work
};

/// While it lives, the first SIGINT and the first SIGTERM are only recorded; a second one of the same kind ends the
/// process as usual. Afterwards the signals are handled as before.
class InterruptGuard {
 public:
  /// `restarts_calls`: with true, a system call that waits continues after a signal; with false, it fails with EINTR.
  explicit InterruptGuard(bool restarts_calls = true);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// True if a signal has come while this or an earlier guard lived.
  static bool has_come();
  /// Throws Interrupted if a signal has come.
  void check(const char* remains = "nothing was written") const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

}  // namespace muster::tool
