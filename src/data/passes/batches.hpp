// The batches of one pass, read ahead.
#pragma once

#include "data/passes/prefetch.hpp"
#include "data/passes/shard.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::data {

/// Refuses what no pass can do. `name`: of the dataset.
void check(const std::string& name, const BatchOptions& options);

/// What a BatchRange iterates over. Reads on the prefetching thread; everything that touches the shard's state, on the
/// thread that iterates.
class BatchStream {
 public:
  /// `options.device`: none leaves the batches where they are.
  BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options);
  /// Ends the pass.
  ~BatchStream();
  BatchStream(const BatchStream&) = delete;
  BatchStream& operator=(const BatchStream&) = delete;

  /// Begins the pass: starts reading and takes the first batch in hand. Once.
  void start();
  /// Takes the next batch in hand.
  void advance();
  bool at_end() const noexcept { return at_end_; }
  Batch& current() noexcept { return current_; }
  /// Of the pass, or of that which would begin now.
  std::int64_t num_batches() const noexcept;

 private:
  void end();

  std::shared_ptr<ShardState> shard_;
  BatchOptions options_;
  std::int64_t count_;        ///< samples of the dataset
  std::optional<Pass> pass_;  ///< once it has begun
  std::optional<Prefetch> batches_;
  Batch current_;
  bool at_end_ = false;
};

}  // namespace muster::detail::data
