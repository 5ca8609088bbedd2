#include "data/passes/blocks_ahead.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

BlocksAhead::BlocksAhead(std::function<void(const std::vector<std::int64_t>& samples)> prepare, bool uses_threads)
    : prepare_(std::move(prepare)), threads_("muster-ahead", uses_threads ? 2 : 0) {
  has_threads_ = threads_.start() > 0;
}

void BlocksAhead::add(std::span<const ExpectedBlock> blocks) {
  if (blocks.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    waiting_.insert(waiting_.end(), blocks.begin(), blocks.end());
  }
  if (!has_threads_) return;
  threads_.add([this] {
    Lock lock(mutex_);
    prepare_all(lock);
  });
}

void BlocksAhead::wait_for(std::span<const LaneRange> rows) {
  const auto has_rows = [&](const ExpectedBlock& block) {
    return std::ranges::any_of(
        rows, [&](const LaneRange& range) { return range.lane == block.lane && block.first < range.last; });
  };
  Lock lock(mutex_);
  if (!has_threads_) return prepare_all(lock);
  changed_.wait(lock, [&] {
    return std::ranges::none_of(waiting_, has_rows) &&
           std::ranges::none_of(in_work_, [&](const auto& blocks) { return std::ranges::any_of(blocks, has_rows); });
  });
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
