// Ctrl-C while something is being written: the work ends at a place where it can clean up.
#pragma once

#include <csignal>

namespace muster::tool {

/// The exit code of a program that a signal ended.
struct Interrupted {
  int exit_code;
};

/// While it lives, the first SIGINT or SIGTERM is noted; the second ends the process as usual.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// Throws Interrupted if a signal came.
  void check() const;

 private:
  struct sigaction before_int_ {};
  struct sigaction before_term_ {};
};

}  // namespace muster::tool
