#include "data/sources/decoding_threads.hpp"

#include "base/cpus.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr int most_threads = 4;

}  // namespace

DecodingThreads::~DecodingThreads() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void DecodingThreads::start() {
  const int threads = std::min(most_threads, count_usable_cores() - 1);
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {  // the system has no more threads; those that are there will do
  }
}

void DecodingThreads::help() {
  ::pthread_setname_np(::pthread_self(), "muster-decode");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return leaving_ || !jobs_.empty(); });
    if (leaving_) return;
    work_on(*jobs_.front(), lock);
  }
}

void DecodingThreads::work_on(Job& job, std::unique_lock<std::mutex>& lock) {
  while (job.next < job.count) {
    const auto number = job.next++;
    if (job.next == job.count) jobs_.remove(&job);
    ++job.running;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*job.work)(number);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --job.running;
    if (error && (!job.error || number < job.failed)) {
      job.error = std::move(error);
      job.failed = number;
    }
    if (job.error && job.next < job.count) {
      job.next = job.count;
      jobs_.remove(&job);
    }
  }
  if (job.running == 0) changed_.notify_all();
}

void DecodingThreads::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count == 0) return;
  if (count > 1) std::call_once(started_, [this] { start(); });
  Job job{.work = &work, .count = count};
  std::unique_lock lock(mutex_);
  jobs_.push_back(&job);
  if (count > 1) changed_.notify_all();
  work_on(job, lock);
  changed_.wait(lock, [&job] { return job.running == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace muster::detail::data
