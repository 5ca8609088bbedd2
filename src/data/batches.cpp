#include "data/batches.hpp"

#include "data/source.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace muster {
namespace data {
namespace {

/// Reads the rank's shards of the steps of a pass, one per call.
class StepReader {
 public:
  StepReader(std::shared_ptr<Source> source, Pass pass, const BatchOptions& options)
      : source_(std::move(source)),
        pass_(std::move(pass)),
        dtypes_(options.dtypes),
        device_(options.device),
        left_(pass_.num_steps()) {}

  std::optional<Batch> operator()() {
    if (left_ == 0) return {};
    const auto step =
        step_at(pass_.position, pass_.order.size(), pass_.global_batch, pass_.share.total, pass_.share.first + shard_);
    const at::NoGradGuard no_grad;
    const Batch read = source_->read(samples_of(step, pass_.order));
    std::vector<Batch::Item> items;
    for (const auto& [name, tensor] : read) items.emplace_back(name, converted(name, tensor));
    if (++shard_ == pass_.share.count) {
      shard_ = 0;
      pass_.position += step.samples;
      --left_;
    }
    return Batch(std::move(items), step.mine.count, step.samples);
  }

 private:
  at::Tensor converted(const std::string& name, const at::Tensor& tensor) const {
    const auto dtype = dtypes_.find(name);
    return tensor.to(device_.value_or(tensor.device()), dtype == dtypes_.end() ? tensor.scalar_type() : dtype->second);
  }

  std::shared_ptr<Source> source_;
  Pass pass_;
  std::map<std::string, at::ScalarType> dtypes_;
  std::optional<at::Device> device_;
  std::int64_t left_;  ///< steps
  int shard_ = 0;
};

}  // namespace

BatchStream::BatchStream(std::shared_ptr<ShardState> shard, const BatchOptions& options)
    : shard_(std::move(shard)), options_(options), pass_([&] {
        for (const auto& dtype : options.dtypes)
          column_of(*shard_->dataset.source(), dtype.first, "converting dataset \"" + shard_->name + "\"");
        return shard_->begin_pass(options);
      }()) {}

BatchStream::~BatchStream() { end(); }

void BatchStream::start() {
  if (batches_ || at_end_)
    throw Error(ExitCode::usage, "iterating over dataset \"" + shard_->name + "\"",
                "begin() was called twice on one range", "Ask the shard for a new range for each pass");
  batches_.emplace(StepReader(shard_->dataset.source(), pass_, options_), options_.prefetch_batches);
  advance();
}

void BatchStream::advance() {
  current_ = {};  // its memory may serve the next
  auto next = batches_->next();
  if (!next) return end();
  current_ = std::move(*next);
  shard_->take(pass_, current_, std::exchange(next_, (next_ + 1) % pass_.share.count));
}

void BatchStream::end() {
  if (std::exchange(at_end_, true)) return;
  batches_.reset();
  current_ = {};
  shard_->end_pass(pass_);
}

}  // namespace data

Batch& BatchRange::iterator::operator*() const { return stream_->current(); }

Batch* BatchRange::iterator::operator->() const { return &stream_->current(); }

BatchRange::iterator& BatchRange::iterator::operator++() {
  stream_->advance();
  return *this;
}

bool BatchRange::iterator::at_end() const noexcept { return stream_->at_end(); }

BatchRange::BatchRange(std::unique_ptr<data::BatchStream> stream) : stream_(std::move(stream)) {}
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
