#include "data/samples.hpp"
#include "data/step_weight.hpp"
#include "muster/data_loader.hpp"

namespace muster::data {
namespace {

class StepDealer final : public Dealer {
 public:
  StepDealer(const Worker& worker, std::int64_t size, std::int64_t global_batch, const DataLoaderOptions& options)
      : worker_(worker),
        global_batch_(global_batch),
        shuffle_(options.shuffle),
        drop_last_(options.drop_last),
        order_(size, {}) {}

  void set_epoch(std::int64_t epoch) override {
    if (epoch == epoch_) return;
    epoch_ = epoch;
    passes_ = 0;
  }

  void begin_pass() override {
    order_ = Order(order_.size(), {.shuffle = shuffle_, .seed = worker_.seed, .epoch = epoch_, .pass = passes_++});
    dealt_ = taken_ = 0;
    end_pass();
  }

  std::optional<std::vector<std::size_t>> deal(std::size_t) override {
    if (num_steps(dealt_, order_.size(), global_batch_, drop_last_) == 0) return {};
    const auto step = step_at_position(dealt_);
    dealt_ += step.samples;
    const auto samples = samples_of(step, order_);
    return std::vector<std::size_t>(samples.begin(), samples.end());
  }

  std::int64_t take() override {
    const auto step = step_at_position(taken_);
    taken_ += step.samples;
    if (worker_.weight) *worker_.weight = {step.mine.count, step.samples};
    return step.mine.count;
  }

  void end_pass() noexcept override {
    if (worker_.weight) *worker_.weight = {};
  }

 private:
  Step step_at_position(std::int64_t position) const {
    return step_at(position, order_.size(), global_batch_, worker_.world, worker_.rank);
  }

  Worker worker_;
  std::int64_t global_batch_;
  bool shuffle_, drop_last_;
  Order order_;
  std::int64_t epoch_ = 0, passes_ = 0;
  std::int64_t dealt_ = 0, taken_ = 0;  ///< positions of the batches read ahead and of the one in hand
};

}  // namespace

std::shared_ptr<Dealer> step_dealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options) {
  std::int64_t batch = 0;
  if (options.global_batch_size)
    batch = static_cast<std::int64_t>(*options.global_batch_size);
  else if (__builtin_mul_overflow(options.batch_size, worker.world, &batch))
    batch = size + 1;
  if (batch < 1) throw Error(ExitCode::usage, "preparing a data loader", "the batch size is 0", "Give at least 1");
  return std::make_shared<StepDealer>(worker, size, batch, options);
}

}  // namespace muster::data
