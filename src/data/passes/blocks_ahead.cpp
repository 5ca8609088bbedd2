#include "data/passes/blocks_ahead.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace muster::detail::data {

BlocksAhead::BlocksAhead(std::function<void(const std::vector<std::int64_t>& samples)> prepare, bool uses_threads)
    : prepare_(std::move(prepare)) {
  try {
    while (uses_threads && threads_.size() < 2) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {  // the system has no more threads; a single thread, or wait_for(), does the work
  }
}

BlocksAhead::~BlocksAhead() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void BlocksAhead::add(std::span<const ExpectedBlock> blocks) {
  if (blocks.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    waiting_.insert(waiting_.end(), blocks.begin(), blocks.end());
  }
  changed_.notify_all();
}

void BlocksAhead::wait_for(std::span<const LaneRange> rows) {
  const auto has_rows = [&](const ExpectedBlock& block) {
    return std::ranges::any_of(
        rows, [&](const LaneRange& range) { return range.lane == block.lane && block.first < range.last; });
  };
  Lock lock(mutex_);
  if (threads_.empty()) return prepare_all(lock);
  changed_.wait(lock, [&] {
    return std::ranges::none_of(waiting_, has_rows) &&
           std::ranges::none_of(in_work_, [&](const auto& blocks) { return std::ranges::any_of(blocks, has_rows); });
  });
}

void BlocksAhead::work() {
  ::pthread_setname_np(::pthread_self(), "muster-ahead");
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return leaving_ || !waiting_.empty(); });
    if (leaving_) return;
    prepare_all(lock);
  }
}

void BlocksAhead::prepare_all(Lock& lock) {
  if (waiting_.empty()) return;
  const auto mine = in_work_.insert(in_work_.end(), std::exchange(waiting_, {}));
  std::vector<std::int64_t> samples;
  for (const auto& block : *mine) samples.push_back(block.sample);
  lock.unlock();
  try {
    prepare_(samples);
  } catch (...) {  // the batch that needs the block meets the same error
  }
  lock.lock();
  in_work_.erase(mine);
  changed_.notify_all();
}

}  // namespace muster::detail::data
