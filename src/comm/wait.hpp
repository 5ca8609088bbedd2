// Waiting: a bounded spin, then yielding the core, then short sleeps, so that an oversubscribed node still works.
#pragma once

#include "muster/communicator.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace muster::detail::comm {

/// How long ranks wait for each other by default: half an hour.
constexpr std::chrono::milliseconds default_timeout{1'800'000};

/// Tells the processor that this is a spin loop.
inline void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// True if the ranks of this node may together run on at least as many CPUs as there are ranks, or if their CPUs are
/// not known. False until the first world is made.
inline std::atomic<bool> has_core_per_rank{false};

/// Calls ready() until it is true, for some tens of microseconds, without giving up the core. If cores do not suffice
/// it spins for less than a microsecond, since the rank that this one waits for may need the core.
template <class Ready>
bool spin_until(Ready&& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr int calls = 20;
  std::optional<Clock::time_point> end;
  do {
    for (int call = 0; call < calls; ++call) {
      if (ready()) return true;
      pause();
    }
    if (!end) end = Clock::now() + std::chrono::microseconds(40);
  } while (has_core_per_rank.load(std::memory_order_relaxed) && Clock::now() < *end);
  return false;
}

/// Measures how long a wait has lasted, for its timeout. Gaps of a second or more between polls do not count: the
/// process did not run, and if the job was suspended, the other ranks did not run either.
class WaitTime {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitTime(Clock::time_point now = Clock::now()) : begun_(now), polled_(now) {}
  /// Returns how long the wait has lasted. Call it at each poll, more often than once a second.
  std::chrono::nanoseconds until(Clock::time_point now = Clock::now()) {
    const auto gap = now - std::exchange(polled_, now);
    if (gap >= std::chrono::seconds(1)) suspended_ += gap;
    return now - begun_ - suspended_;
  }
  /// All gaps together.
  std::chrono::nanoseconds suspended() const noexcept { return suspended_; }

 private:
  Clock::time_point begun_, polled_;
  Clock::duration suspended_{};
};

/// Calls ready() until it is true; false past the timeout. In the first 200 ms it spins each time before it gives up
/// the core, since an operation of many steps waits in each step. Calls between() each time before it gives up the
/// core.
template <class Ready, class Between>
bool wait_until(Ready&& ready, std::chrono::milliseconds timeout, Between&& between) {
  using namespace std::chrono_literals;
  WaitTime time;
  for (auto waited = 0ns;; waited = time.until()) {
    const bool is_long = waited > 200ms;
    if (is_long ? ready() : spin_until(ready)) return true;
    between();
    if (waited > timeout) return false;
    if (is_long)
      std::this_thread::sleep_for(50us);
    else
      ::sched_yield();
  }
}
template <class Ready>
bool wait_until(Ready&& ready, std::chrono::milliseconds timeout) {
  return wait_until(ready, timeout, [] {});
}

/// Waits until ready() is true, as every wait on a communicator does. Throws RemoteError if another rank has raised an
/// alarm, an Error (ExitCode::user_error) if it finds ranks in different calls, and past `timeout` an Error
/// (ExitCode::retry) whose text begins with doing(). An empty `timeout` stands for the launch's timeout, plus the time
/// that late ranks have announced. Collective.
void wait_on(const Communicator& communicator, const std::function<bool()>& ready,
             const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> timeout = {});

}  // namespace muster::detail::comm
