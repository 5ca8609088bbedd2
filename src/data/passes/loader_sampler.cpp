// The samplers of data loaders. The batch in hand is the one that the program got last.
#include "base/duration.hpp"
#include "data/passes/pass_positions.hpp"
#include "muster/data_loader.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <deque>
#include <limits>

namespace muster::detail::data {
namespace {

constexpr const char* preparing = "preparing a data loader";

std::int64_t signed_size(std::size_t size) {
  return static_cast<std::int64_t>(std::min(size, std::size_t{std::numeric_limits<std::int64_t>::max()}));
}

/// Base of both samplers: begins and ends the passes over the loader, in its pass position.
class PassSampler : public LoaderSampler {
 public:
  PassSampler(const Worker& worker, std::int64_t size, const DataLoaderOptions& options, bool resumable)
      : worker_(worker),
        size_(size),
        options_{.training = options.training, .shuffle = options.shuffle, .drop_last = options.drop_last} {
    if (options.batch_size == 0 || options.global_batch_size == std::size_t{0})
      throw Error(ExitCode::usage, preparing, "the batch size is 0", "Give at least 1");
    options_.batch_size = signed_size(options.batch_size);
    if (options.global_batch_size) options_.global_batch_size = signed_size(*options.global_batch_size);
    pass_position_ = worker.pass_positions->find_loader(options.name);
    if (!pass_position_ || pass_position_->options().resumable != resumable) {
      pass_position_ =
          std::make_shared<PassPosition>(PassPositionOptions{.name = options.name,
                                                             .share = {.total = worker.world, .first = worker.rank},
                                                             .full_worker_count = worker.full_worker_count,
                                                             .seed = worker.seed,
                                                             .loader = true,
                                                             .resumable = resumable});
      worker.pass_positions->add(pass_position_);
    }
  }

  void set_epoch(std::int64_t epoch) override {
    options_.training ? pass_position_->set_epoch(epoch) : pass_position_->set_epoch_if_untrained(epoch);
  }

  std::int64_t begin_pass() override {
    end_pass(pass_.number);
    pass_ = pass_position_->begin_pass(options_, {.count = size_}, self_);
    batch_.reset();
    begin();
    return pass_.number;
  }

  void stop_if_asked() override {
    if (batch_) pass_position_->stop_if_asked(pass_);
  }

  void end_pass(std::int64_t pass) noexcept override {
    if (pass != pass_.number || pass == 0) return;
    pass_position_->end_pass(pass_);
    pass_.number = 0;
    batch_.reset();
  }

  const step::BatchWeightPtr& batch() const noexcept override { return batch_; }

 protected:
  virtual void begin() = 0;
  /// Takes `batch` in hand; its step has `samples` samples over all ranks.
  void take(const step::BatchWeight& batch, std::int64_t samples) {
    batch_ = std::make_shared<step::BatchWeight>(batch);
    pass_position_->begin_batch(pass_, batch_, samples);
  }

  const Worker worker_;
  Pass pass_{.order = Order(0, {})};

 private:
  std::int64_t size_;
  BatchOptions options_;
  std::shared_ptr<PassPosition> pass_position_;
  step::BatchWeightPtr batch_;
  std::shared_ptr<const void> self_ = std::make_shared<char>();
};

/// Chooses the samples itself, this worker's part of each step.
class SplitSampler final : public PassSampler {
 public:
  using PassSampler::PassSampler;

  std::optional<std::vector<std::size_t>> next(std::size_t) override {
    if (num_steps(read_, pass_.order.size(), pass_.plan.global_batch, pass_.plan.drop_last) == 0) return {};
    const auto samples = samples_of(step_from(read_), pass_.order);
    return std::vector<std::size_t>(samples.begin(), samples.end());
  }

  std::int64_t begin_batch() override {
    const auto step = step_from(taken_);
    take({.local = step.mine.count,
          .global = step.samples,
          .number = (pass_.number << 32) + ++batches_,
          .total = worker_.world},
         step.samples);
    return step.mine.count;
  }

 private:
  void begin() override {
    read_ = taken_ = pass_.position;
    batches_ = 0;
  }
  /// Returns the step at `position` and moves `position` to the end of the step.
  StepSamples step_from(std::int64_t& position) const {
    const auto step = step_at(position, pass_.order.size(), pass_.plan.global_batch, worker_.world, worker_.rank);
    position += step.samples;
    return step;
  }

  std::int64_t read_ = 0;   ///< end of the steps read ahead, in samples
  std::int64_t taken_ = 0;  ///< end of the step whose batch is in hand, in samples
  std::int64_t batches_ = 0;
};

/// Takes the samples that the user's own sampler chooses.
class FollowSampler final : public PassSampler {
 public:
  FollowSampler(const Worker& worker, std::int64_t size, const DataLoaderOptions& options, OwnSampler sampler)
      : PassSampler(worker, size, options, false), sampler_(std::move(sampler)) {}

  bool is_own() const noexcept override { return true; }

  void set_epoch(std::int64_t epoch) override {
    PassSampler::set_epoch(epoch);
    sampler_.set_epoch(epoch);
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    if (empty_) return {};
    auto samples = sampler_.next(batch_size);
    if (samples) read_.push_back(static_cast<std::int64_t>(samples->size()));
    return samples;
  }

  std::int64_t begin_batch() override {
    const auto samples = read_.front();
    read_.pop_front();
    take({.total = worker_.world}, samples * worker_.world);
    return samples;
  }

 private:
  void begin() override {
    empty_ = pass_.position > 0;
    read_.clear();
    sampler_.reset();
  }

  OwnSampler sampler_;
  bool empty_ = false;             ///< the pass was finished before the run was stopped
  std::deque<std::int64_t> read_;  ///< sample counts of the batches read but not in hand yet
};

}  // namespace

void run_as_wait_for_data(const std::function<void()>& read) {
  const watch::ScopedActivity waiting(watch::Activity::data);
  const watch::TraceSpan span("wait for data");
  read();
}

std::shared_ptr<LoaderSampler> split_sampler(const Worker& worker, std::int64_t size,
                                             const DataLoaderOptions& options) {
  return std::make_shared<SplitSampler>(worker, size, options, /*resumable=*/true);
}

std::shared_ptr<LoaderSampler> follow_sampler(const Worker& worker, std::int64_t size, const DataLoaderOptions& options,
                                              OwnSampler sampler) {
  const auto refuse = [](const char* option, const char* remedy) {
    throw Error(ExitCode::usage, preparing, std::string(option) + " is set, but a sampler of your own decides that",
                remedy);
  };
  if (options.global_batch_size) refuse("global_batch_size", "Give batch_size, or no sampler");
  if (options.shuffle) refuse("shuffle", "Give a sampler that shuffles, or none");
  return std::make_shared<FollowSampler>(worker, size, options, std::move(sampler));
}

torch::data::DataLoaderOptions torch_options(const DataLoaderOptions& options, bool own_sampler) {
  torch::data::DataLoaderOptions given(options.batch_size);
  if (options.timeout) given.timeout(usable_timeout(*options.timeout));
  return given.workers(options.workers).drop_last(own_sampler && options.drop_last);
}

}  // namespace muster::detail::data
