// Starts a thread of muster's own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace muster::detail {

/// The thread blocks all signals: other threads receive them. `name`: at most 15 characters, for tools that list
/// threads.
template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  struct Mask {
    sigset_t before = {};
    ~Mask() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } mask;
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &mask.before);
  std::thread thread(std::forward<Body>(body));
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace muster::detail
