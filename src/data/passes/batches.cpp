#include "data/passes/batches.hpp"

#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace muster {
namespace detail::data {
namespace {

/// Reads the rank's micro-batches of the steps of a pass, one per call.
class StepReader {
 public:
  StepReader(std::shared_ptr<Source> source, Pass pass, bool split, const BatchOptions& options)
      : source_(std::move(source)),
        pass_(std::move(pass)),
        split_(split),
        dtypes_(options.dtypes),
        device_(options.device),
        left_(pass_.num_steps()) {}

  std::optional<Batch> operator()() {
    if (left_ == 0) return {};
    const auto& share = pass_.share;
    const auto step =
        step_at(pass_.position, pass_.order.size(), pass_.plan.global_batch, share.total, share.first + micro_batch_);
    const at::NoGradGuard no_grad;
    const Batch read = source_->read(samples_of(step, pass_.order));
    std::vector<Batch::Item> items;
    for (const auto& [name, tensor] : read) items.emplace_back(name, converted(name, tensor));
    step::BatchWeightPtr weight;
    if (split_)
      weight = std::make_shared<step::BatchWeight>(step::BatchWeight{.local = step.mine.count,
                                                                     .global = step.samples,
                                                                     .micro_batch = micro_batch_,
                                                                     .micro_batches = share.count,
                                                                     .number = (pass_.number << 32) + ++given_,
                                                                     .total = share.total});
    if (++micro_batch_ == share.count) {
      micro_batch_ = 0;
      pass_.position += step.samples;
      --left_;
    }
    return Batch(std::move(items), step.mine.count, step.samples, std::move(weight));
  }

 private:
  at::Tensor converted(const std::string& name, const at::Tensor& tensor) const {
    const auto dtype = dtypes_.find(name);
    return tensor.to(device_.value_or(tensor.device()), dtype == dtypes_.end() ? tensor.scalar_type() : dtype->second);
  }

  std::shared_ptr<Source> source_;
  Pass pass_;
  bool split_;
  std::map<std::string, at::ScalarType> dtypes_;
  std::optional<at::Device> device_;
  std::int64_t left_;  ///< steps
  int micro_batch_ = 0;
  std::int64_t given_ = 0;  ///< batches
};

}  // namespace

BatchStream::BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options)
    : shard_(std::move(shard)), options_(options), count_(shard_->dataset.count()) {
  check(shard_->options().name, options);
  for (const auto& dtype : options.dtypes)
    column_of(*shard_->dataset.source(), dtype.first, "converting dataset \"" + shard_->options().name + "\"");
}

BatchStream::~BatchStream() { end(); }

void BatchStream::start() {
  if (pass_ || at_end_)
    throw Error(ExitCode::usage, "iterating over dataset \"" + shard_->options().name + "\"",
                "begin() was called twice on one range", "Ask the shard for a new range for each pass");
  pass_ = shard_->begin_pass(options_, count_);
  batches_.emplace(StepReader(shard_->dataset.source(), *pass_, shard_->options().split, options_),
                   options_.prefetch_batches);
  advance();
}

void BatchStream::advance() {
  if (current_.step()) shard_->end_batch(*pass_);
  current_ = {};  // its memory may serve the next
  auto next = batches_->next();
  if (!next) return end();
  current_ = std::move(*next);
  if (current_.step()) shard_->begin_batch(*pass_, current_.step(), current_.global_size());
}

void BatchStream::end() {
  if (std::exchange(at_end_, true)) return;
  batches_.reset();
  current_ = {};
  if (pass_) shard_->end_pass(*pass_);
}

std::int64_t BatchStream::num_batches() const noexcept {
  const auto pass = pass_ ? *pass_ : shard_->plan(options_, count_);
  return pass.num_steps() * pass.share.count;
}

}  // namespace detail::data

Batch& BatchRange::iterator::operator*() const { return stream_->current(); }

Batch* BatchRange::iterator::operator->() const { return &stream_->current(); }

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

std::int64_t BatchRange::num_batches() const noexcept { return stream_->num_batches(); }

}  // namespace muster
