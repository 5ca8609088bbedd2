// Where a process stands: a stack of its main thread by itself, and what the kernel says of any process of this node.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <string>

namespace muster::detail::watch {

/// When that process was started, by the kernel's clock; 0 where there is none.
std::int64_t start_of(pid_t process) noexcept;

/// What the kernel says of a process that was started then, in words: "it is stopped (State T, in do_signal_stop)".
/// Empty where it runs or sleeps as any process does, which says nothing.
std::string state_of(pid_t process, std::int64_t started);

/// The main thread's stack, taken by a signal to it. Made on the main thread, one inside another's life; while it lives
/// the signal is its own.
class MainStack {
 public:
  MainStack();
  ~MainStack();
  MainStack(const MainStack&) = delete;
  MainStack& operator=(const MainStack&) = delete;

  /// On another thread: a frame a line, the innermost first; what is known instead where it does not come within that
  /// time. A sleep or read of the main thread may return early (EINTR).
  std::string take() const;

 private:
  struct sigaction before_ {};
};

}  // namespace muster::detail::watch
