// Threads that decode chunks beside the one that reads a batch.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace muster::detail::data {

/// As many threads as there are cores for this process beside the caller's, at most 4. They start when they are needed
/// first, and there are none on one core.
class DecodingThreads {
 public:
  DecodingThreads() = default;
  DecodingThreads(const DecodingThreads&) = delete;
  ~DecodingThreads();

  /// Calls work(0) … work(count − 1), on this thread and the others, and returns when all calls have returned. After an
  /// exception no more calls begin; of several, that of the lowest number is thrown here. Thread-safe.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  struct Job {
    const std::function<void(std::size_t)>* work;
    std::size_t count;
    std::size_t next = 0, running = 0;
    std::size_t failed = 0;  ///< the number of the call that threw `error`
    std::exception_ptr error = {};
  };

  void start();
  void help();
  /// Makes calls of the job until none is left to begin.
  void work_on(Job& job, std::unique_lock<std::mutex>& lock);

  std::once_flag started_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Job*> jobs_;  ///< those with calls left to begin
  bool leaving_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace muster::detail::data
