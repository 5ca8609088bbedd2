// How one waits: a bounded spin, then yielding, then short naps, so that an oversubscribed node does not collapse.
#pragma once

#include "muster/communicator.hpp"

#include <sched.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace muster::comm {

/// Tells the processor that this is a spin.
inline void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Calls ready() until it is true, some tens of microseconds long, without giving up the core; for less than one where
/// the ranks of this node are more than its cores, since the one that is waited for may want this one's.
template <class Ready>
bool spin_until(Ready&& ready, int ranks_of_node) {
  using Clock = std::chrono::steady_clock;
  static const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  constexpr int calls = 20;
  std::optional<Clock::time_point> end;
  do {
    for (int call = 0; call < calls; ++call) {
      if (ready()) return true;
      pause();
    }
    if (!end) end = Clock::now() + std::chrono::microseconds(40);
  } while (ranks_of_node <= cores && Clock::now() < *end);
  return false;
}

/// Calls ready() until it is true; false past the limit.
template <class Ready>
bool wait_until(Ready&& ready, std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  for (int spin = 0; spin < 20; ++spin)
    if (ready()) return true;
  const auto begin = Clock::now();
  for (;;) {
    if (ready()) return true;
    const auto waited = Clock::now() - begin;
    if (waited > limit) return false;
    if (waited < 200ms)
      ::sched_yield();
    else
      std::this_thread::sleep_for(50us);
  }
}

/// Until ready() is true, as every wait on a communicator does: a bounded spin, then asking whether another rank has
/// failed (RemoteError), up to the limit of the launch unless one is given (Error, ExitCode::retry). `doing` gives the
/// beginning of that error.
void wait_for(const Communicator& communicator, const std::function<bool()>& ready,
              const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> limit = {});

}  // namespace muster::comm
