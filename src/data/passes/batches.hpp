// The batches of one pass, read ahead.
#pragma once

#include "data/passes/shard.hpp"
#include "data/sources/source.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::data {

/// What Prefetch needs to know where `produce` may be in a call of the user's for long: the reader of a stream.
struct SlowReader {
  std::string dataset;                ///< its name, for errors
  std::stop_source stop;              ///< asked when nobody wants more batches
  std::optional<Communicator> ranks;  ///< which see that this one waits, and whose failures it hears meanwhile
};

/// Calls `produce` until it gives none, on a thread of its own up to `ahead` batches ahead; with 0 on the caller's.
class Prefetch {
 public:
  using Produce = BatchReader;

  Prefetch(Produce produce, int ahead, std::optional<SlowReader> slow = {});
  /// Waits for the call under way, drops what nobody asked for. A slow reader is asked to stop first; where it does not
  /// return within the limit of the launch, the job ends.
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  /// The next batch, none at the end, with what was left to do on this thread. Throws what `produce` has thrown, after
  /// the batches made before; then none come.
  std::optional<Batch> next();

 private:
  using Lock = std::unique_lock<std::mutex>;
  void run();
  std::optional<ReadBatch> take();
  void wait_for_batch(Lock& lock);
  void leave_slow_reader();

  const Produce produce_;
  const std::size_t ahead_;
  std::optional<SlowReader> slow_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ReadBatch> ready_;
  std::exception_ptr error_;
  bool finished_ = false;  ///< nothing more will be produced
  bool leaving_ = false;
  bool ended_ = false;  ///< the thread has no more to do
  std::thread thread_;
};

/// What a BatchRange iterates over. Only reading is on the prefetching thread; the shard belongs to who iterates.
class BatchStream {
 public:
  /// Ends the pass.
  virtual ~BatchStream();
  BatchStream(const BatchStream&) = delete;
  BatchStream& operator=(const BatchStream&) = delete;

  /// Begins the pass: starts reading and takes the first batch in hand. Once.
  void start();
  /// Takes the next batch in hand. An Error where the pass is over, as for current().
  void advance();
  bool at_end() const noexcept { return at_end_; }
  Batch& current();
  /// Of the pass, or of that which would begin now.
  virtual std::int64_t num_batches() const = 0;

 protected:
  /// `count`: samples of the dataset, 0 if nobody knows.
  BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options, std::int64_t count);

  std::string doing() const { return "iterating over dataset \"" + shard_->options().name + "\""; }
  const ShardState& shard() const noexcept { return *shard_; }
  const BatchOptions& options() const noexcept { return options_; }
  /// The one that has begun, or that would begin now.
  Pass pass() const { return pass_ ? *pass_ : shard_->plan(options_, count_); }

 private:
  /// What reads the batches of the pass that begins.
  virtual std::unique_ptr<Prefetch> open(const Pass& pass) = 0;
  /// The next batch in hand, of those that were read.
  virtual std::optional<Batch> take(Prefetch& batches) { return batches.next(); }
  void require_more() const;
  void end();

  std::shared_ptr<ShardState> shard_;
  BatchOptions options_;
  std::int64_t count_;
  std::optional<Pass> pass_;  ///< once it has begun
  std::unique_ptr<Prefetch> batches_;
  std::exception_ptr error_;  ///< thrown in the place of a batch, and so again
  Batch current_;             ///< the program may move from it, or put another in its place
  bool in_hand_ = false;      ///< it is one that counts
  bool at_end_ = false;
};

/// `options.device`: none leaves the batches where they are.
std::unique_ptr<BatchStream> open_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options);
/// Of a dataset that is a stream, in stream_batches.cpp.
std::unique_ptr<BatchStream> open_stream_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options);

/// With types and device as the options say.
std::vector<Batch::Item> converted(const Batch& batch, const BatchOptions& options);
/// The batch after `then`, which comes after what is left to do with it, on the same thread.
ReadBatch finished(ReadBatch read, std::function<void(Batch&)> then);

}  // namespace muster::detail::data
