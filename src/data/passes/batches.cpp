#include "data/passes/batches.hpp"

#include "data/passes/batch_conversion.hpp"
#include "data/passes/batch_options.hpp"
#include "data/passes/blocks_ahead.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <ATen/core/grad_mode.h>

#include <utility>
#include <vector>

namespace muster {
namespace detail::data {
namespace {

/// Reads the rank's micro-batches of the steps of a pass, one per call.
struct StepReader {
  std::shared_ptr<Source> source;
  Pass pass;
  bool split;
  BatchConversion conversion;
  std::int64_t steps_left = pass.num_steps();
  int micro_batch = 0;
  std::int64_t batch_count = 0;             ///< batches returned so far
  std::shared_ptr<BlocksAhead> ahead = {};  ///< null without lanes

  void request(std::span<const LaneRange> rows) const {
    std::vector<std::int64_t> samples;
    for (const auto& block : blocks_to_expect(rows, *pass.order.lanes(), Ahead::request))
      samples.push_back(block.sample);
    try {
      if (!samples.empty()) source->expect(samples, Ahead::request);
    } catch (const Error&) {  // the batch that needs the block meets the same error
    }
  }

  std::optional<ReadBatch> operator()() {
    if (steps_left == 0) return {};
    const auto& share = pass.share;
    const auto step =
        step_at(pass.position, pass.order.size(), pass.plan.global_batch, share.total, share.first + micro_batch);
    const at::NoGradGuard no_grad;
    std::vector<LaneRange> rows;
    if (ahead) {
      rows = lanes_of(step, *pass.order.lanes());
      request(rows);
      ahead->wait_for(rows);
    }
    auto read = source->read_ahead(samples_of(step, pass.order), pass.order.random_seed(step.mine.first));
    // Only now, since reading the batch has made room in the cache.
    if (ahead) ahead->add(blocks_to_expect(rows, *pass.order.lanes(), Ahead::decode));
    step::BatchWeightPtr weight;
    if (split)
      weight = std::make_shared<step::BatchWeight>(step::BatchWeight{.local = step.mine.count,
                                                                     .global = step.samples,
                                                                     .micro_batch = micro_batch,
                                                                     .micro_batches = share.count,
                                                                     .number = (pass.number << 32) + ++batch_count,
                                                                     .total = share.total});
    if (++micro_batch == share.count) {
      micro_batch = 0;
      pass.position += step.samples;
      --steps_left;
    }
    conversion.add_to(read, [step, weight = std::move(weight)](std::vector<Batch::Item> columns) {
      return Batch(std::move(columns), step.mine.count, step.samples, weight);
    });
    return read;
  }
};

/// The batches of a dataset whose samples have indices.
class IndexedBatches final : public BatchStream {
 public:
  IndexedBatches(std::shared_ptr<ShardState> of, const BatchOptions& options)
      : BatchStream(of, options, data_of(*of, options)) {
    for (const auto& dtype : options.dtypes.named())
      column_of(*source_of(of->dataset), dtype.first, "converting dataset \"" + of->options().name + "\"");
  }

  std::int64_t num_batches() const override {
    const auto counted = pass();
    return counted.num_steps() * counted.share.count;
  }

 private:
  static PassData data_of(const ShardState& shard, const BatchOptions& options) {
    check_options(options, doing(shard));
    const auto& source = source_of(shard.dataset);
    PassData data{
        .count = source->count(), .blocks = source->blocks(), .lengths = [source] { return source->lengths(); }};
    data.weights = table_of(options.weights, data.count, doing(shard));
    if (options.bucket_samples) require_lengths(*source, doing(shard));
    return data;
  }

  std::unique_ptr<Prefetch> open(const Pass& pass) override {
    const auto& source = source_of(shard().dataset);
    StepReader reader{source, pass, shard().options().split, BatchConversion(options())};
    if (pass.order.lanes() != nullptr)
      reader.ahead = std::make_shared<BlocksAhead>(
          [source](const auto& samples) { source->expect(samples, Ahead::decode); }, options().prefetch_batches > 0);
    return std::make_unique<Prefetch>(std::move(reader), options().prefetch_batches, source->threads());
  }
};

}  // namespace

std::unique_ptr<BatchStream> open_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options) {
  if (shard->options().stream || source_of(shard->dataset)->draws())
    return open_stream_batches(std::move(shard), options);
  return std::make_unique<IndexedBatches>(std::move(shard), options);
}

BatchStream::BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options, PassData data)
    : shard_(std::move(shard)), options_(options), data_(std::move(data)) {
  options_.weights.reset();  // data_ has the alias table that was made of them
}

BatchStream::~BatchStream() { end(); }

void BatchStream::start() {
  if (pass_ || at_end_)
    throw Error(ExitCode::usage, doing(), "begin() was called twice on one range",
                "Ask the shard for a new range for each pass");
  pass_ = shard_->begin_pass(options_, data_);
  batches_ = open(*pass_);
  advance();
}

void BatchStream::require_more() const {
  if (at_end_)
    throw Error(
        ExitCode::user_error, doing(), "the pass has no more batches",
        "Compare the iterator with end() before each use. After a resume, passes of the epoch that were finished "
        "before come back empty");
}

Batch& BatchStream::current() {
  require_more();
  return current_;
}

void BatchStream::advance() {
  require_more();
  if (std::exchange(in_hand_, false)) shard_->stop_if_asked(*pass_);
  current_ = {};  // frees its memory for the next batch
  if (error_) std::rethrow_exception(error_);
  std::optional<Batch> next;
  try {
    const watch::ScopedActivity waiting(watch::Activity::data);
    const watch::TraceSpan span("wait for data");
    next = take(*batches_);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  if (!next) return end();
  current_ = std::move(*next);
  if (!step_weight_of(current_)) return;
  shard_->begin_batch(*pass_, step_weight_of(current_), current_.global_size());
  in_hand_ = true;
}

void BatchStream::end() {
  if (std::exchange(at_end_, true)) return;
  batches_.reset();
  current_ = {};
  if (!pass_) return;
  source_of(shard_->dataset)->end_threads();  // a dataset may outlive the session, and its threads should not
  shard_->end_pass(*pass_);
}

}  // namespace detail::data

Batch& BatchRange::iterator::operator*() const { return stream_->current(); }

BatchRange::iterator& BatchRange::iterator::operator++() {
  stream_->advance();
  return *this;
}

bool BatchRange::iterator::at_end() const noexcept { return stream_->at_end(); }

BatchRange::BatchRange(std::unique_ptr<detail::data::BatchStream> stream) : stream_(std::move(stream)) {}
BatchRange::BatchRange(BatchRange&&) noexcept = default;
BatchRange& BatchRange::operator=(BatchRange&&) noexcept = default;
BatchRange::~BatchRange() = default;

BatchRange::iterator BatchRange::begin() {
  iterator first;
  stream_->start();
  first.stream_ = stream_.get();
  return first;
}

std::int64_t BatchRange::num_batches() const { return stream_->num_batches(); }

}  // namespace muster
