// A thread that advances communication while backward() computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace muster::detail::gradients {

class ProgressThread {
 public:
  /// `advance` does a small piece of work and returns true if there was any. It neither waits nor throws.
  explicit ProgressThread(std::function<bool()> advance);
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  /// Makes the thread call advance() repeatedly.
  void start() { set_state(State::running); }
  /// Returns when a running advance() has returned. The thread does not call it again before the next start().
  void stop() { set_state(State::idle); }
  /// Returns a lock; advance() is not called while it is held.
  std::unique_lock<std::mutex> pause();

 private:
  enum class State { idle, running, ending };
  void set_state(State state);
  void run();

  std::function<bool()> advance_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{State::idle};  ///< written with the mutex locked
  std::atomic<int> waiting_{0};  ///< number of callers that wait for the mutex; the thread unlocks it for them
  std::thread thread_;
};

}  // namespace muster::detail::gradients
