#include "data/passes/batches.hpp"

#include <utility>

namespace muster::detail::data {

Prefetch::Prefetch(Produce produce, int ahead) : produce_(std::move(produce)), ahead_(static_cast<std::size_t>(ahead)) {
  if (ahead_ > 0) thread_ = std::thread([this] { run(); });
}

Prefetch::~Prefetch() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Prefetch::run() {
  std::unique_lock lock(mutex_);
  while (!finished_) {
    changed_.wait(lock, [this] { return leaving_ || ready_.size() < ahead_; });
    if (leaving_) return;
    lock.unlock();
    std::optional<Batch> batch;
    try {
      batch = produce_();
    } catch (...) {
      error_ = std::current_exception();  // nobody looks before it is finished
    }
    lock.lock();
    finished_ = !batch;
    if (batch) ready_.push_back(std::move(*batch));
    changed_.notify_all();
  }
}

std::optional<Batch> Prefetch::next() {
  if (ahead_ == 0) {
    if (finished_) return {};
    finished_ = true;  // unless this gives a batch
    auto batch = produce_();
    finished_ = !batch;
    return batch;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return finished_ || !ready_.empty(); });
  if (!ready_.empty()) {
    std::optional<Batch> batch(std::move(ready_.front()));
    ready_.pop_front();
    changed_.notify_all();
    return batch;
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return {};
}

}  // namespace muster::detail::data
