// The batches of one pass, read ahead.
#pragma once

#include "data/prefetch.hpp"
#include "data/shard.hpp"

#include <cstdint>
#include <memory>
#include <optional>

namespace muster::data {

/// What a BatchRange iterates over. Reads on the prefetching thread; everything that touches the shard's state, on the
/// thread that iterates.
class BatchStream {
 public:
  /// Begins a pass. `options.device`: none leaves the batches where they are.
  BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options);
  /// Ends the pass.
  ~BatchStream();
  BatchStream(const BatchStream&) = delete;
  BatchStream& operator=(const BatchStream&) = delete;

  /// Starts reading and takes the first batch in hand. Once.
  void start();
  /// Takes the next batch in hand.
  void advance();
  bool at_end() const noexcept { return at_end_; }
  Batch& current() noexcept { return current_; }
  std::int64_t num_batches() const noexcept { return pass_.num_steps() * pass_.share.count; }

 private:
  void end();

  std::shared_ptr<ShardState> shard_;
  BatchOptions options_;
  Pass pass_;
  std::optional<Prefetch> batches_;
  Batch current_;
  int next_ = 0;  ///< which of the rank's shards of a step the next batch is
  bool at_end_ = false;
};

}  // namespace muster::data
