// A pool of threads that run tasks.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail {

/// Runs tasks on threads of its own, and begins them in the order in which they were added. Thread-safe.
///
/// A task becomes unwanted when rest() is called on its pool, or when the task that added it becomes unwanted. So when
/// a pass over data is left early, work that its tasks have given to other pools ends too: run() begins no more calls.
class ThreadPool {
 public:
  /// Thrown in a task that is unwanted, by run() and throw_if_unwanted().
  struct Unwanted : std::exception {
    const char* what() const noexcept override { return "the pass for which this was done has been left"; }
  };

  /// `name`: the system's name for the threads, at most 15 characters. `most`: the largest number of threads. If it is
  /// a function, it is called once, when threads are first started.
  ThreadPool(const char* name, std::function<int()> most) : name_(name), count_(std::move(most)) {}
  ThreadPool(const char* name, int most) : ThreadPool(name, [most] { return most; }) {}
  ~ThreadPool() { rest(); }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Starts the threads that are not running. Returns how many are running: fewer than `most` if the system refuses
  /// more.
  std::size_t start();
  /// Gives the task, which must not throw, to a thread. Starts the threads; drops the task if none can be started.
  void add(std::function<void()> task);
  /// Calls work(0) … work(count − 1), on this thread and the pool's, and returns when all calls have returned. After an
  /// exception no more calls begin; of several exceptions, that of the call with the lowest number is thrown here. If
  /// the caller is a task that becomes unwanted, no more calls begin, and Unwanted is thrown if some were left.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);
  /// Drops the tasks that have not begun, waits for the running ones and ends the threads. The next task starts threads
  /// again.
  void rest();

  static void throw_if_unwanted();

 private:
  struct Task {
    std::function<void()> work;
    std::stop_token stop;  ///< the stop token of the task that added this one
  };

  void work(const std::stop_token& stop);
  /// Does the work of start(). The caller holds the mutex.
  std::size_t start_locked();

  const char* const name_;
  const std::function<int()> count_;
  std::optional<std::size_t> most_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Task> tasks_;
  std::vector<std::jthread> threads_;
};

}  // namespace muster::detail
