#include "gradients/progress_thread.hpp"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <utility>

namespace muster::detail::gradients {

ProgressThread::ProgressThread(std::function<bool()> advance) : advance_(std::move(advance)) {
  // Block all signals in the new thread: the existing threads handle them.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), "muster-progress");
}

ProgressThread::~ProgressThread() {
  set_state(State::ending);
  thread_.join();
}

std::unique_lock<std::mutex> ProgressThread::pause() {
  ++waiting_;
  std::unique_lock lock(mutex_);
  --waiting_;
  return lock;
}

void ProgressThread::set_state(State state) {
  {
    const auto lock = pause();
    state_ = state;
  }
  changed_.notify_one();
}

void ProgressThread::run() {
  // While there is nothing to do, leave the core to other threads, such as one that reads data.
  constexpr auto nap = std::chrono::microseconds(50);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return state_ != State::idle; });
    if (state_ == State::ending) return;
    const bool advanced = advance_();
    if (advanced && waiting_ == 0) continue;
    lock.unlock();
    if (advanced)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(nap);
    lock.lock();
  }
}

}  // namespace muster::detail::gradients
