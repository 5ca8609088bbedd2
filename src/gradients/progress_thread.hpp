// A thread that advances communication while backward() computes.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>

namespace muster::detail::gradients {

class ProgressThread {
 public:
  /// `advance` does a small piece of work and returns true if there was any. It neither waits nor throws.
  explicit ProgressThread(std::function<bool()> advance);
  /// In a child of fork(), which has no such thread, it waits for nothing.
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  /// Makes the thread call advance() repeatedly.
  void start();
  /// Returns when a running advance() has returned. The thread does not call it again before the next start().
  void stop();

 private:
  struct Thread;

  std::unique_ptr<Thread> thread_;
  pid_t process_;
};

}  // namespace muster::detail::gradients
