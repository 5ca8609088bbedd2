// How one waits: a bounded spin, then yielding, then short naps, so that an oversubscribed node does not collapse.
#pragma once

#include "muster/communicator.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace muster::detail::comm {

/// How long ranks wait for each other where nobody has set another limit.
constexpr std::chrono::milliseconds default_limit{1'800'000};

/// Tells the processor that this is a spin.
inline void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Whether this node has a core for each rank of the launch: how many the ranks may run on, all together. No until the
/// world is made.
inline std::atomic<bool> cores_suffice{false};

/// Calls ready() until it is true, some tens of microseconds long, without giving up the core; for less than one where
/// cores do not suffice, since the rank that is waited for may want this one's.
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
  } while (cores_suffice.load(std::memory_order_relaxed) && Clock::now() < *end);
  return false;
}

/// Calls ready() until it is true; false past the limit. It spins before it gives up the core each time, since an
/// operation of many steps waits in each of them; between() is called as often as it gives it up.
template <class Ready, class Between>
bool wait_until(Ready&& ready, std::chrono::milliseconds limit, Between&& between) {
  using namespace std::chrono_literals;
  const auto begin = std::chrono::steady_clock::now();
  for (auto waited = 0ns;; waited = std::chrono::steady_clock::now() - begin) {
    const bool is_long = waited > 200ms;
    if (is_long ? ready() : spin_until(ready)) return true;
    between();
    if (waited > limit) return false;
    if (is_long)
      std::this_thread::sleep_for(50us);
    else
      ::sched_yield();
  }
}
template <class Ready>
bool wait_until(Ready&& ready, std::chrono::milliseconds limit) {
  return wait_until(ready, limit, [] {});
}

/// Until ready() is true, as every wait on a communicator does: a bounded spin, then asking whether another rank has
/// failed (RemoteError), up to the limit of the launch unless one is given (Error, ExitCode::retry). `doing` gives the
/// beginning of that error.
void wait_on(const Communicator& communicator, const std::function<bool()>& ready,
             const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> limit = {});

}  // namespace muster::detail::comm
