#include "operators/batches.hpp"

#include "base/text.hpp"
#include "data/passes/pass_positions.hpp"
#include "muster/error.hpp"
#include "step/batch_weight.hpp"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

namespace muster::detail::operators {
namespace {

class ShardPasses final : public Passes {
 public:
  ShardPasses(const DatasetShard& shard, const BatchOptions& options, std::shared_ptr<data::Source> source,
              std::vector<std::string> columns)
      : shard_(shard), options_(options), source_(std::move(source)), columns_(std::move(columns)) {}

  void begin(std::int64_t) override {
    range_.emplace(shard_.iter_torch_batches(options_));
    at_ = range_->begin();
    select_columns();
  }
  void advance() override {
    ++at_;
    select_columns();
  }
  Batch* current() override { return !has_batch() ? nullptr : selected_ ? &*selected_ : &*at_; }
  void end() override {
    selected_.reset();
    range_.reset();
  }
  std::optional<std::string> without_column_order() override {
    if (!columns_.empty() || source_->has_column_order()) return {};
    return source_->shown();
  }

 private:
  bool has_batch() const { return range_ && at_ != range_->end(); }
  void select_columns() {
    selected_.reset();
    if (columns_.empty() || !has_batch()) return;
    std::vector<Batch::Item> items;
    for (const auto& name : columns_) items.emplace_back(name, (*at_)[name]);
    selected_.emplace(std::move(items), at_->size(), at_->global_size(), step_weight_of(*at_));
  }

  DatasetShard shard_;
  BatchOptions options_;
  std::shared_ptr<data::Source> source_;
  std::vector<std::string> columns_;
  std::optional<BatchRange> range_;
  BatchRange::iterator at_;
  std::optional<Batch> selected_;  ///< the current batch, reduced to `columns_`
};

void check_steps(const char* doing, std::optional<std::int64_t> limit) {
  if (limit.value_or(1) < 1)
    throw Error(ExitCode::usage, doing, str("num_steps is ", *limit), "Give 1 or more, or leave it out");
}

/// Throws an Error inside a call, since the passes own the current batch.
void require_between_calls(bool in_call, const std::string& call) {
  if (in_call)
    throw Error(ExitCode::user_error, "registering data", "the operator is inside " + call,
                "Call register_data() in setup(), or between two calls of the trainer by apply_all_operators()");
}

void require_loader(const char* doing, const std::unique_ptr<Passes>& passes, const char* loader, bool has_model) {
  if (passes) return;
  if (!has_model)
    throw Error(ExitCode::user_error, doing, str("the operator has no ", loader, " and no model"),
                "Call register_training() and register_data() in its setup()");
  throw Error(ExitCode::user_error, doing, str("the operator has no ", loader),
              "Call register_data() with one in its setup()");
}

}  // namespace

std::unique_ptr<Passes> passes_over(const DatasetShard& shard, const BatchOptions& options,
                                    const std::shared_ptr<data::Source>& source, std::vector<std::string> columns) {
  return std::make_unique<ShardPasses>(shard, options, source, std::move(columns));
}

at::Tensor stacked(const std::vector<at::Tensor>& examples) { return at::stack(examples); }

Batch make_batch(at::Tensor data, at::Tensor target, std::int64_t samples, step::BatchWeightPtr step) {
  std::optional<std::int64_t> everywhere;
  if (step && step->global > 0) everywhere = step->global;
  return Batch({{"data", std::move(data)}, {"target", std::move(target)}}, samples, everywhere, std::move(step));
}

void TrainBatches::set_passes(std::unique_ptr<Passes> passes) {
  require_between_calls(in_call_, "train()");
  if (passes_) passes_->end();
  first_.reset();
  passes_ = std::move(passes);
  if (keeps_position_) return;
  open_ = false;
  // A restored position belongs to the data that were just replaced, so it is dropped.
  if (resumes_) set_epoch_count(epochs_), taken_ = 0;
}

void TrainBatches::check_call(std::optional<std::int64_t> limit, bool has_model) const {
  check_steps("training", limit);
  require_loader("training", passes_, "train_loader", has_model);
}

void TrainBatches::begin_call(std::optional<std::int64_t> limit) {
  session_.data.pass_positions->enter_loop();
  limit_ = limit;
  in_call_ = true;
  session_.progress.pass_end_is_boundary = limit.has_value();
  // begin_call() takes a batch before the call asks for it. If the last call has not asked, its batch is still there,
  // and is the first batch of this call.
  if (first_ && *first_ != nullptr)
    ++taken_;
  else
    first_ = take();
}

void TrainBatches::end_call() {
  session_.progress.pass_end_is_boundary = true;
  session_.progress.steps->epoch.loop = step::EpochLoop::between;
  in_call_ = false;
  taken_ = 0;
}

Batch* TrainBatches::next() { return first_ ? *std::exchange(first_, std::nullopt) : take(); }

Batch* TrainBatches::take() {
  if (limit_ ? taken_ >= *limit_ : taken_ > 0 && !open_ && !resumes_) return nullptr;
  for (bool fresh = false;;) {
    if (open_) {
      passes_->advance();
    } else {
      if (fresh)
        throw Error(ExitCode::data, "training", "a pass over the data has no batches",
                    "Give more samples than drop_last leaves out");
      if (!std::exchange(resumes_, false)) {
        fresh = true;
        ++epochs_;
        session_.data.pass_positions->begin_epoch(epochs_ - 1);
      }
      open_ = true;
      passes_->begin(epochs_ - 1);
    }
    if (auto* const batch = passes_->current()) return ++taken_, batch;
    passes_->end();
    open_ = false;
    if (!limit_ && taken_ > 0) return nullptr;
  }
}

void TrainBatches::set_epoch_count(std::int64_t epochs) {
  if (keeps_position_) return;
  if (passes_) passes_->end();
  first_.reset();
  open_ = resumes_ = false;
  epochs_ = epochs;
  const auto before = std::max<std::int64_t>(0, epochs - 1);
  // begin_epoch() does nothing in the current epoch, so another epoch begins first.
  session_.data.pass_positions->begin_epoch(before + 1);
  session_.data.pass_positions->begin_epoch(before);
}

void ValidationBatches::set_passes(std::unique_ptr<Passes> passes) {
  require_between_calls(in_call_, "validate()");
  passes_ = std::move(passes);
}

void ValidationBatches::check_call(std::optional<std::int64_t> limit, bool has_model) const {
  check_steps("validating", limit);
  require_loader("validating", passes_, "validation_loader", has_model);
}

void ValidationBatches::begin_call(std::optional<std::int64_t> limit, std::int64_t epoch) {
  limit_ = limit;
  epoch_ = epoch;
  in_call_ = true;
}

void ValidationBatches::end_call() {
  end_pass();
  in_call_ = false;
}

void ValidationBatches::end_pass() {
  passes_->end();
  open_ = false;
}

Batch* ValidationBatches::first() {
  end_pass();
  passes_->begin(epoch_);
  open_ = true;
  taken_ = 1;
  return current_batch();
}

Batch* ValidationBatches::next() {
  if (!open_) return nullptr;
  if (limit_ && taken_ >= *limit_) return end_pass(), nullptr;
  passes_->advance();
  ++taken_;
  return current_batch();
}

Batch* ValidationBatches::current_batch() {
  auto* const batch = passes_->current();
  if (batch == nullptr) end_pass();
  return batch;
}

}  // namespace muster::detail::operators
