#include "gradients/progress_thread.hpp"

#include "base/thread.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
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

  void set_state(State now) {
    ++waiting;
    {
      const std::lock_guard lock(mutex);
      --waiting;
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
  thread_->thread = start_thread("muster-gradient", [thread = thread_.get()] { thread->run(); });
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

}  // namespace muster::detail::gradients
