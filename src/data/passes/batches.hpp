// The batches of one pass, read ahead. The batch in hand is the one that the program got last; it is in hand until the
// program asks for the next one.
#pragma once

#include "base/export.hpp"
#include "base/thread_pool.hpp"
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

namespace muster::detail::data {

/// Given to Prefetch if `produce` reads a stream: a call of the user's reader may take long.
struct SlowReader {
  std::string dataset;                       ///< the dataset's name, for errors
  std::stop_source stop;                     ///< stop is requested when no more batches are wanted
  std::optional<Communicator> communicator;  ///< its ranks see that this rank waits for the reader; polled for failures
};

/// Reads and works on batches ahead of the thread that takes them.
///
/// A thread calls `produce` until it returns none or throws. If `threads` is 1, this thread also does the work on each
/// batch before it reads the next one. Otherwise `threads` other threads do the work, on several batches at once. Up to
/// `ahead` + `threads` − 1 batches are read and not taken. If `ahead` is 0, next() does everything on the caller's
/// thread.
class MUSTER_INTERNAL_API Prefetch {
 public:
  using Produce = BatchReader;

  Prefetch(Produce produce, int ahead, int threads = 1, std::optional<SlowReader> slow = {});
  /// Waits for the calls under way and drops the batches not taken. A slow reader is asked to stop first; if it has a
  /// communicator and does not return within the launch's timeout, the job ends.
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  /// Returns the next batch, or none at the end. First does the work that is left to the thread that takes the batch.
  /// An exception of `produce` or of the work is thrown in place of its batch; later calls return none.
  std::optional<Batch> next();

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// A batch that was read. The thread that has set `in_work` may use `read` without the lock.
  struct Slot {
    ReadBatch read;
    std::exception_ptr error = {};
    bool in_work = false;
    bool is_left = false;  ///< the next piece of work is left to the thread that takes the batch

    bool is_ready() const noexcept { return error || is_left || (!in_work && read.work.empty()); }
  };

  void read_batches();
  void work_on_batches();
  bool work_once(Lock& lock);
  Slot* next_to_work_on();
  std::optional<ReadBatch> take();
  void wait_for_batch(Lock& lock);
  void leave();
  void end_slow_reader();

  const Produce produce_;
  const std::size_t ahead_;
  const int threads_;
  std::optional<SlowReader> slow_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Slot> slots_;       ///< in the order of the batches; a deque, since references must stay valid
  bool finished_ = false;        ///< nothing more will be read
  bool leaving_ = false;         ///< no more batches are wanted; only the thread that takes them sets it
  bool ended_ = false;           ///< the thread that reads has left read_batches()
  ThreadPool workers_, reader_;  ///< declared last: their threads use the other members
};

/// The batches that a BatchRange iterates over. The shard belongs to the thread that iterates; threads that read ahead
/// do not use it.
class BatchStream {
 public:
  /// Ends the pass.
  virtual ~BatchStream();
  BatchStream(const BatchStream&) = delete;
  BatchStream& operator=(const BatchStream&) = delete;

  /// Begins the pass: starts reading and takes the first batch in hand. Call it once.
  void start();
  /// Takes the next batch in hand. Throws an Error if the pass is over.
  void advance();
  bool at_end() const noexcept { return at_end_; }
  /// The batch in hand. Throws an Error if the pass is over.
  Batch& current();
  /// Batches of this pass, or of the pass that would begin now. Throws an Error for a stream.
  virtual std::int64_t num_batches() const = 0;

 protected:
  BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options, PassData data);

  std::string doing() const { return doing(*shard_); }
  static std::string doing(const ShardState& shard) {
    return "iterating over dataset \"" + shard.options().name + "\"";
  }
  const ShardState& shard() const noexcept { return *shard_; }
  const BatchOptions& options() const noexcept { return options_; }
  /// The pass that has begun, or else the pass that would begin now.
  Pass pass() const { return pass_ ? *pass_ : shard_->plan(options_, data_); }

 private:
  /// Opens a reader for the batches of `pass`, which begins now.
  virtual std::unique_ptr<Prefetch> open(const Pass& pass) = 0;
  /// Makes the next batch in hand from the batches that were read; none at the end.
  virtual std::optional<Batch> take(Prefetch& batches) { return batches.next(); }
  void require_more() const;
  void end();

  std::shared_ptr<ShardState> shard_;
  BatchOptions options_;
  PassData data_;
  std::optional<Pass> pass_;  ///< none until it has begun
  std::unique_ptr<Prefetch> batches_;
  std::exception_ptr error_;  ///< was thrown instead of a batch; each later advance() throws it again
  Batch current_;             ///< the program may move from it or assign to it
  bool in_hand_ = false;      ///< begin_batch() was called for current_, so stop_if_asked() comes before the next one
  bool at_end_ = false;
};

/// Opens the batches of a dataset of any kind. Without `options.device` the batches stay where they were read.
std::unique_ptr<BatchStream> open_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options);
/// Opens the batches of a dataset that is a stream or draws its samples; defined in stream_batches.cpp.
std::unique_ptr<BatchStream> open_stream_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options);

}  // namespace muster::detail::data
