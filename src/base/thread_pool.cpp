#include "base/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <system_error>
#include <utility>

namespace muster::detail {
namespace {

/// The stop token of the task that this thread runs. On a thread without a task, stop is never requested.
thread_local std::stop_token stop_of_task;

}  // namespace

std::size_t ThreadPool::start() {
  const std::lock_guard lock(mutex_);
  return start_locked();
}

std::size_t ThreadPool::start_locked() {
  if (!most_) most_ = static_cast<std::size_t>(count_());
  try {
    while (threads_.size() < *most_) threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  } catch (const std::system_error&) {  // the system refuses more threads; go on with those that run
  }
  return threads_.size();
}

void ThreadPool::add(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (start_locked() == 0) return;
    tasks_.push_back({std::move(task), stop_of_task});
  }
  changed_.notify_one();
}

void ThreadPool::work(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), name_);
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !tasks_.empty(); }) && !stop.stop_requested()) {
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::stop_source unwanted;
    stop_of_task = unwanted.get_token();
    const auto ask = [&unwanted] { unwanted.request_stop(); };
    {
      const std::stop_callback at_rest(stop, ask), with_adder(task.stop, ask);
      task.work();
    }
    lock.lock();
  }
}

void ThreadPool::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  struct Job {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t next = 0, running = 0;
    std::size_t failed = 0;  ///< the number of the call that threw `error`
    std::exception_ptr error = {};
  };
  const auto job = std::make_shared<Job>();  // shared, because a task may begin after all calls have returned
  const auto make_calls = [job, count, &work] {
    std::unique_lock lock(job->mutex);
    while (job->next < count && !stop_of_task.stop_requested()) {
      const auto number = job->next++;
      ++job->running;
      lock.unlock();
      std::exception_ptr error;
      try {
        work(number);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      --job->running;
      if (error && (!job->error || number < job->failed)) {
        job->error = std::move(error);
        job->failed = number;
      }
      if (job->error) job->next = count;
    }
    if (job->running == 0) job->changed.notify_all();
  };
  try {
    const auto others = count > 1 ? std::min(count - 1, start()) : 0;
    for (std::size_t other = 0; other < others; ++other) add(make_calls);
  } catch (const std::bad_alloc&) {  // this thread makes the calls that no other thread makes
  }
  make_calls();
  std::unique_lock lock(job->mutex);
  const bool is_unwanted = std::exchange(job->next, count) < count;
  job->changed.wait(lock, [&job] { return job->running == 0; });
  if (job->error) std::rethrow_exception(job->error);
  if (is_unwanted) throw Unwanted();
}

void ThreadPool::rest() {
  std::vector<std::jthread> ended;  // joined without the lock
  const std::lock_guard lock(mutex_);
  tasks_.clear();
  for (auto& thread : threads_) thread.request_stop();
  ended.swap(threads_);
}

void ThreadPool::throw_if_unwanted() {
  if (stop_of_task.stop_requested()) throw Unwanted();
}

}  // namespace muster::detail
