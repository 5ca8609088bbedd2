// How one waits: a bounded spin, then yielding, then short naps, so that an oversubscribed node does not collapse.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

namespace muster::comm {

/// Calls ready() until it is true; false past the limit.
template <class Ready>
bool wait_until(Ready&& ready, std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  for (int spin = 0; spin < 200; ++spin)
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

}  // namespace muster::comm
