// The stack of this process's main thread, and the kernel's state of any process of this node.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <string>

namespace muster::detail::watch {

/// Returns the start time of that process in the kernel's clock ticks since boot; 0 if there is no such process.
std::int64_t start_time_of(pid_t process) noexcept;

/// Describes the kernel's state of a process that was started at `started` (see start_time_of()), for example "it is
/// stopped (State T, in do_signal_stop): by SIGSTOP or the like". Empty if it runs or sleeps normally.
std::string state_of(pid_t process, std::int64_t started);

/// Takes the main thread's stack by a signal to it. Construct it on the main thread; instances may be nested. While it
/// lives it owns the signal SIGRTMIN + 11.
class MainThreadStack {
 public:
  MainThreadStack();
  ~MainThreadStack();
  MainThreadStack(const MainThreadStack&) = delete;
  MainThreadStack& operator=(const MainThreadStack&) = delete;

  /// Returns the innermost frames of the stack, at most 38, one per line, the innermost first. If the main thread does
  /// not react within 150 ms, the text says so and where in the kernel it is. Call it on another thread. A sleep or
  /// read of the main thread may return early (EINTR).
  std::string take() const;

 private:
  struct sigaction before_ {};
};

}  // namespace muster::detail::watch
