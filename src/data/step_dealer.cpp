#include "data/passes.hpp"
#include "data/samples.hpp"
#include "data/track.hpp"
#include "muster/data_loader.hpp"

#include <deque>
#include <limits>

namespace muster::detail::data {
namespace {

constexpr const char* preparing = "preparing a data loader";

/// What loaders have in common: passes that are counted with the session's.
class CountedDealer : public Dealer {
 public:
  CountedDealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options, bool resumable)
      : worker_(worker),
        size_(size),
        options_{.training = options.training, .shuffle = options.shuffle, .drop_last = options.drop_last},
        passes_(worker.passes ? worker.passes : std::make_shared<Passes>()) {
    if (options.batch_size == 0 || options.global_batch_size == std::size_t{0})
      throw Error(ExitCode::usage, preparing, "the batch size is 0", "Give at least 1");
    options_.batch_size = number(options.batch_size);
    if (options.global_batch_size) options_.global_batch_size = number(*options.global_batch_size);
    track_ = passes_->find_loader(options.name);
    if (!track_ || track_->resumable != resumable) {
      track_ = std::make_shared<Track>(Track{.name = options.name,
                                             .share = {.total = worker.world, .first = worker.rank},
                                             .seed = worker.seed,
                                             .loader = true,
                                             .resumable = resumable});
      passes_->add(track_);
    }
  }

  void set_epoch(std::int64_t epoch) override {
    options_.training ? track_->set_epoch(epoch) : track_->begin_epoch(epoch);
  }

  std::int64_t begin_pass() override {
    end_pass(pass_.number);
    pass_ = track_->plan(options_, size_);
    if (pass_.training) {
      if (const auto other = track_->trained_by.lock(); track_->under_way && other && other != self_)
        throw Error(ExitCode::usage, "iterating over a data loader",
                    "a pass over another one is under way that is called \"" + track_->name + "\" too",
                    "Give each a name, DataLoaderOptions{.name = …}; one that does not train has .training = false");
      track_->trained_by = self_;
    }
    pass_ = track_->begin_pass(options_, size_);
    step_.reset();
    begin(pass_);
    return pass_.number;
  }

  void leave() override {
    if (step_) track_->leave(pass_);
  }

  void end_pass(std::int64_t pass) noexcept override {
    if (pass != pass_.number || pass == 0) return;
    track_->end_pass(pass_);
    pass_.number = 0;
    step_.reset();
  }

  const step::BatchWeightPtr& step() const noexcept override { return step_; }

 protected:
  virtual void begin(const Pass& pass) = 0;
  /// The batch in hand.
  void take(const step::BatchWeight& step, std::int64_t samples) {
    step_ = std::make_shared<step::BatchWeight>(step);
    track_->take(pass_, step_, samples);
  }
  const Pass& pass() const noexcept { return pass_; }
  const Worker& worker() const noexcept { return worker_; }

 private:
  static std::int64_t number(std::size_t size) {
    return size > std::size_t{std::numeric_limits<std::int64_t>::max()} ? std::numeric_limits<std::int64_t>::max()
                                                                        : static_cast<std::int64_t>(size);
  }

  Worker worker_;
  std::int64_t size_;
  BatchOptions options_;
  std::shared_ptr<Passes> passes_;
  std::shared_ptr<Track> track_;
  Pass pass_{.order = Order(0, {})};
  step::BatchWeightPtr step_;
  std::shared_ptr<const void> self_ = std::make_shared<char>();
};

class StepDealer final : public CountedDealer {
 public:
  StepDealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options)
      : CountedDealer(worker, size, options, true) {}

  std::optional<std::vector<std::size_t>> deal(std::size_t) override {
    const auto& plan = pass().plan;
    if (num_steps(dealt_, pass().order.size(), plan.global_batch, plan.drop_last) == 0) return {};
    const auto step = step_at_position(dealt_);
    dealt_ += step.samples;
    const auto samples = samples_of(step, pass().order);
    return std::vector<std::size_t>(samples.begin(), samples.end());
  }

  std::int64_t take() override {
    const auto step = step_at_position(taken_);
    taken_ += step.samples;
    CountedDealer::take({.local = step.mine.count,
                         .global = step.samples,
                         .number = (pass().number << 32) + ++batches_,
                         .total = worker().world},
                        step.samples);
    return step.mine.count;
  }

 private:
  void begin(const Pass& pass) override {
    dealt_ = taken_ = pass.position;
    batches_ = 0;
  }
  Step step_at_position(std::int64_t position) const {
    return step_at(position, pass().order.size(), pass().plan.global_batch, worker().world, worker().rank);
  }

  std::int64_t dealt_ = 0, taken_ = 0;  ///< positions of the batches read ahead and of the one in hand
  std::int64_t batches_ = 0;
};

class SamplerDealer final : public CountedDealer {
 public:
  SamplerDealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options, OwnSampler sampler)
      : CountedDealer(worker, size, options, false), sampler_(std::move(sampler)) {}

  void set_epoch(std::int64_t epoch) override {
    CountedDealer::set_epoch(epoch);
    sampler_.set_epoch(epoch);
  }

  std::optional<std::vector<std::size_t>> deal(std::size_t batch_size) override {
    if (empty_) return {};
    auto samples = sampler_.next(batch_size);
    if (samples) dealt_.push_back(static_cast<std::int64_t>(samples->size()));
    return samples;
  }

  std::int64_t take() override {
    const auto samples = dealt_.front();
    dealt_.pop_front();
    CountedDealer::take({.total = worker().world}, samples * worker().world);
    return samples;
  }

 private:
  void begin(const Pass& pass) override {
    empty_ = pass.position > 0;
    dealt_.clear();
    sampler_.reset();
  }

  OwnSampler sampler_;
  bool empty_ = false;  ///< the pass was finished before the run was stopped
  std::deque<std::int64_t> dealt_;
};

}  // namespace

std::shared_ptr<Dealer> step_dealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options) {
  return std::make_shared<StepDealer>(worker, size, options);
}

std::shared_ptr<Dealer> sampler_dealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options,
                                       OwnSampler sampler) {
  const auto refuse = [](const char* option, const char* remedy) {
    throw Error(ExitCode::usage, preparing,
                std::string(option) + " is set, and with a sampler of your own it is the sampler that decides", remedy);
  };
  if (options.global_batch_size) refuse("global_batch_size", "Give batch_size, or no sampler");
  if (options.shuffle) refuse("shuffle", "Give a sampler that shuffles, or none");
  return std::make_shared<SamplerDealer>(worker, size, options, std::move(sampler));
}

}  // namespace muster::detail::data
