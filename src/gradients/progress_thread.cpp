#include "gradients/progress_thread.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>

namespace muster::detail::gradients {

/// The thread and what it uses.
struct ProgressThread::Thread {
  enum class State { idle, running, ending };

  std::function<bool()> advance;
  std::mutex mutex = {};
  std::condition_variable changed = {};
  std::atomic<State> state{State::idle};  ///< written with the mutex locked
  std::atomic<int> waiting{0};            ///< number of callers that wait for the mutex; the thread unlocks it for them
  std::thread thread = {};

  std::unique_lock<std::mutex> pause() {
    ++waiting;
    std::unique_lock lock(mutex);
    --waiting;
    return lock;
  }

  void set_state(State now) {
    {
      const auto lock = pause();
      state = now;
    }
    changed.notify_one();
  }

  void run() {
    // While there is nothing to do, leave the core to other threads, such as one that reads data.
    constexpr auto nap = std::chrono::microseconds(50);
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return state != State::idle; });
      if (state == State::ending) return;
      const bool advanced = advance();
      if (advanced && waiting == 0) continue;
      lock.unlock();
      if (advanced)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(nap);
      lock.lock();
    }
  }
};

ProgressThread::ProgressThread(std::function<bool()> advance)
    : thread_(new Thread{.advance = std::move(advance)}), process_(::getpid()) {
  // Block all signals in the new thread: the existing threads handle them.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_->thread = std::thread([thread = thread_.get()] { thread->run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_->thread.native_handle(), "muster-gradient");
}

ProgressThread::~ProgressThread() {
  if (process_ != ::getpid()) {
    // Never freed: the condition variable would wait for the thread, which this child of fork() does not have.
    static_cast<void>(thread_.release());
    return;
  }
  thread_->set_state(Thread::State::ending);
  thread_->thread.join();
}

void ProgressThread::start() { thread_->set_state(Thread::State::running); }
void ProgressThread::stop() { thread_->set_state(Thread::State::idle); }
std::unique_lock<std::mutex> ProgressThread::pause() { return thread_->pause(); }

}  // namespace muster::detail::gradients
