// The exponential moving average of a model's weights, which often validates better than the weights themselves.
//
//   muster::EMA ema(net, {.decay = 0.999});
//   auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"ema", ema}});
//   …
//     optimizer.step();
//     ema.update();
//   …
//   { auto scope = ema.apply(); val_loss = validate(net); }          // with the averaged weights, and back
//   session.report({{"val_loss", val_loss}}, state);
//
// Every rank keeps the averages, and they are the same everywhere without communication, since the weights are. (Not
// after join(), where ranks have made different numbers of updates: a save warns then, and keeps rank 0's.)
//
// In a checkpoint they stand under the names of the model's: Checkpoint::load("ema", net) puts them into a model, and
// `muster checkpoint export --entry ema` gives them to Python.
#pragma once

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
  /// min(decay, (1 + n) / (10 + n)) in place of the decay after n updates, so that the average soon forgets where
  /// training began.
  bool warmup = false;
};
void to_json(Json& json, const EMAOptions& options);
void from_json(const Json& json, EMAOptions& options);

/// While it lives, the module's parameters have the averaged values. Made by EMA::apply.
class EMAScope {
 public:
  EMAScope(const EMAScope&) = delete;
  EMAScope& operator=(const EMAScope&) = delete;
  ~EMAScope();

 private:
  friend class EMA;
  explicit EMAScope(std::shared_ptr<detail::optim::WeightAverages> averages);
  std::shared_ptr<detail::optim::WeightAverages> averages_;
};

/// Parameters are averaged; those of 16 bits in float, where a small change is not lost, and whole numbers are taken as
/// they are. Buffers, such as batch-norm's statistics, are not: they are the model's own, as torch's AveragedModel has
/// it in Python. The first update takes the weights as they are. Copies are one average.
class EMA {
 public:
  /// An Error (ExitCode::usage) for a decay that is not from 0 to 1.
  explicit EMA(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options = {});
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*>
  explicit EMA(const std::shared_ptr<M>& module, const EMAOptions& options = {})
      : EMA(std::shared_ptr<torch::nn::Module>(module), options) {}
  template <ModuleHolder Holder>
  explicit EMA(const Holder& holder, const EMAOptions& options = {})
      : EMA(std::shared_ptr<torch::nn::Module>(holder.ptr()), options) {}

  /// After each step of the optimizer. Before the last batch of a step, where it has several on a worker
  /// (ScalingConfig::virtual_workers), it does nothing, whether the model is prepared or not.
  void update();
  std::int64_t updates() const noexcept;

  /// Moves nothing: the parameters look at the averages, and at the end of the scope, with an exception too, at their
  /// own values again. Before the first update those are the same. In the scope the weights are not to be changed; an
  /// update or another scope, of another EMA of these weights too, is an Error (ExitCode::user_error). So is a report
  /// of a State that has the model or the average in it: report after the scope. Both are refused to be loaded then
  /// (ExitCode::data). What Checkpoint::from_dict takes of the model in the scope, and what is exported, are the
  /// averages, which is how to hand out a model of them under the name "model".
  [[nodiscard]] EMAScope apply() const;

  /// Refers to the average, and keeps it alive.
  operator StateEntry() const;

 private:
  std::shared_ptr<detail::optim::WeightAverages> averages_;
};

}  // namespace muster
