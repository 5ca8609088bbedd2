// Ctrl-C while a file is being written: the work ends at a point where it can clean up.
#pragma once

#include <csignal>

namespace muster::tool {

/// The exit code of a program that was ended by a signal.
struct Interrupted {
  int exit_code;
};

/// While it lives, the first SIGINT or SIGTERM is noted, and the second ends the process as usual.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// Throws Interrupted if a signal has come.
  void check() const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

}  // namespace muster::tool
