// The exponential moving average of a model's weights, which often validates better than the weights themselves.
//
//   muster::EMA ema(net, {.decay = 0.999});
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"ema", ema}});
//   …
//     optimizer.step();
//     ema.update();
//   …
//   { auto scope = ema.apply(); val_loss = validate(net); }          // with the averaged weights, then restored
//   session.report({{"val_loss", val_loss}}, state);
//
// Every rank keeps the averages. They are the same on all ranks without communication, because the weights are. (This
// does not hold after join(), where ranks have made different numbers of updates: a save then warns, and keeps rank 0's
// averages.)
//
// In a checkpoint the averages have the names of the model's parameters: Checkpoint::load("ema", net) loads them into a
// model, and `muster checkpoint export --entry ema` exports them to Python.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>
#include <muster/state.hpp>

#include <concepts>
#include <cstdint>
#include <memory>

namespace muster {

namespace detail::optim {
class WeightAverages;
}

struct EMAOptions {
  /// average = decay × average + (1 − decay) × weight, at each update.
  double decay = 0.999;
  /// Uses min(decay, (1 + n) / (10 + n)) as the decay after n updates, so that the average soon forgets the initial
  /// weights.
  bool warmup = false;
};

/// While it lives, the module's parameters have the averaged values. Made by EMA::apply().
class MUSTER_API EMAScope {
 public:
  EMAScope(const EMAScope&) = delete;
  EMAScope& operator=(const EMAScope&) = delete;
  ~EMAScope();

 private:
  friend class EMA;
  explicit EMAScope(std::shared_ptr<detail::optim::WeightAverages> averages);
  std::shared_ptr<detail::optim::WeightAverages> averages_;
};

/// The averages of a module's parameters. Averages of 16-bit parameters are kept in float, so that small changes are
/// not lost; whole numbers are copied, not averaged. Buffers, such as batch-norm's statistics, are not averaged: they
/// remain the model's own, as in Python's AveragedModel. The first update copies the weights. Copies of an EMA share
/// one average.
class MUSTER_API EMA {
 public:
  /// Throws an Error (ExitCode::usage) if the decay is not from 0 to 1.
  explicit EMA(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options = {});
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*>
  explicit EMA(const std::shared_ptr<M>& module, const EMAOptions& options = {})
      : EMA(std::shared_ptr<torch::nn::Module>(module), options) {}
  template <ModuleHolder Holder>
  explicit EMA(const Holder& holder, const EMAOptions& options = {})
      : EMA(std::shared_ptr<torch::nn::Module>(holder.ptr()), options) {}

  /// Call it after each step of the optimizer. If a step has several batches on a worker
  /// (ScalingConfig::virtual_workers), it does nothing before the last one, whether or not the model is prepared.
  void update();
  std::int64_t updates() const noexcept;

  /// Makes the parameters refer to the averages, without a copy (16-bit parameters get rounded copies); at the end of
  /// the scope, also by an exception, they have their own values again. Before the first update, the averages equal the
  /// weights. Do not change the weights inside the scope. An update or another scope, also of another EMA of these
  /// weights, is an Error (ExitCode::user_error), and so is a report of a State with the model or the average: report
  /// after the scope. Loading the model or the average is refused (ExitCode::data). Checkpoint::from_dict and exports
  /// inside the scope contain the averages as the model's weights; use this to save an averaged model under the name
  /// "model".
  [[nodiscard]] EMAScope apply() const;

  /// An entry that refers to the average, and keeps it alive.
  operator StateEntry() const;

 private:
  std::shared_ptr<detail::optim::WeightAverages> averages_;
};

}  // namespace muster
