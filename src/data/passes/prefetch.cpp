#include "comm/agreement.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/rank_status.hpp"
#include "comm/time_limit.hpp"
#include "data/passes/batches.hpp"
#include "muster/error.hpp"
#include "watch/trace.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace muster::detail::data {
namespace {

/// How often a wait for a slow reader polls for the failure of another rank.
constexpr std::chrono::milliseconds poll_interval{50};

}  // namespace

Prefetch::Prefetch(Produce produce, int ahead, std::optional<SlowReader> slow)
    : produce_(std::move(produce)), ahead_(static_cast<std::size_t>(ahead)), slow_(std::move(slow)) {
  if (ahead_ > 0) thread_ = std::thread([this] { run(); });
}

Prefetch::~Prefetch() {
  if (slow_) slow_->stop.request_stop();
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  if (slow_ && slow_->communicator) leave_slow_reader();
  thread_.join();
}

/// Waits until the thread has ended. It cannot be left running, since it may use objects that the program destroys
/// next; after the time limit the job ends.
void Prefetch::leave_slow_reader() {
  const auto limit = comm::time_limit(*slow_->communicator);
  Lock lock(mutex_);
  const auto ended = [this] { return ended_; };
  if (changed_.wait_for(lock, std::min(limit, poll_interval), ended)) return;
  const comm::WaitingForReader waiting(*slow_->communicator);
  if (changed_.wait_for(lock, limit, ended)) return;
  const auto seconds = std::to_string(std::chrono::duration<double>(limit).count());
  comm::give_up(
      *slow_->communicator,
      Error(ExitCode::retry, "leaving a pass over the stream \"" + slow_->dataset + "\"",
            "its reader has not returned within " + seconds.substr(0, seconds.find('.') + 2) + " s" +
                (std::uncaught_exceptions() > 0 ? ", and an exception of the program is held up by that" : ""),
            "Have the reader return when StreamShard::stop asks for it; --timeout sets the limit"));
}

void Prefetch::run() {
  ::pthread_setname_np(::pthread_self(), "muster-read");
  Lock lock(mutex_);
  while (!finished_) {
    changed_.wait(lock, [this] { return leaving_ || ready_.size() < ahead_; });
    if (leaving_) break;
    lock.unlock();
    std::optional<ReadBatch> batch;
    try {
      const watch::TraceSpan span("read batch");
      batch = produce_();
    } catch (...) {
      error_ = std::current_exception();  // no lock: not read before finished_ is set
    }
    lock.lock();
    finished_ = !batch;
    if (batch) ready_.push_back(std::move(*batch));
    changed_.notify_all();
  }
  ended_ = true;
  changed_.notify_all();
}

std::optional<Batch> Prefetch::next() {
  auto read = take();
  if (!read) return {};
  if (read->finish) read->finish(read->batch);
  return std::move(read->batch);
}

std::optional<ReadBatch> Prefetch::take() {
  if (ahead_ == 0) {
    if (finished_) return {};
    finished_ = true;  // unless this gives a batch
    auto batch = produce_();
    finished_ = !batch;
    return batch;
  }
  Lock lock(mutex_);
  wait_for_batch(lock);
  if (!ready_.empty()) {
    std::optional<ReadBatch> batch(std::move(ready_.front()));
    ready_.pop_front();
    changed_.notify_all();
    return batch;
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return {};
}

void Prefetch::wait_for_batch(Lock& lock) {
  const auto there = [this] { return finished_ || !ready_.empty(); };
  if (!slow_ || !slow_->communicator) return changed_.wait(lock, there);
  if (changed_.wait_for(lock, poll_interval, there)) return;
  const comm::WaitingForReader waiting(*slow_->communicator);
  do {
    lock.unlock();
    comm::throw_if_alarm_raised(*slow_->communicator);
    lock.lock();
  } while (!changed_.wait_for(lock, poll_interval, there));
}

}  // namespace muster::detail::data
