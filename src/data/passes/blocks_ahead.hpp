// Threads that prepare the next blocks of samples while batches are read.
#pragma once

#include "base/thread_pool.hpp"
#include "data/passes/samples.hpp"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <span>
#include <vector>

namespace muster::detail::data {

/// Two threads take turns. Each prepares all blocks that were added since the last turn; `prepare` decodes their chunks
/// on several threads. While one is at its last chunks and has no work for all threads, the other begins with the next
/// blocks. So all threads decode, even if each batch needs few new blocks. Belongs to the thread that reads batches.
class BlocksAhead {
 public:
  /// `prepare` is given a sample of each block. If it throws, the batch that needs the block reads it itself.
  /// Several threads call it at once. `uses_threads`: false to call it in wait_for().
  BlocksAhead(std::function<void(const std::vector<std::int64_t>& samples)> prepare, bool uses_threads);

  void add(std::span<const ExpectedBlock> blocks);
  /// Returns when the added blocks in which these rows lie are prepared, or could not be.
  void wait_for(std::span<const LaneRange> rows);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void prepare_all(Lock& lock);

  const std::function<void(const std::vector<std::int64_t>& samples)> prepare_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ExpectedBlock> waiting_;
  std::list<std::vector<ExpectedBlock>> in_work_;
  bool has_threads_ = false;
  ThreadPool threads_;  ///< ends first, which waits for the calls under way
};

}  // namespace muster::detail::data
