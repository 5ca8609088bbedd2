// Optimizers that know of the other ranks: session.prepare_optimizer.
//
//   auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 1e-3), {.max_grad_norm = 1.0});
//   …
//   optimizer.zero_grad();
//   loss.backward();
//   optimizer.step();
//
// It still is the Adam that was given: schedulers, states and checkpoints take it as one. Where it gains, the step is
// fused with the averaging of gradients: each rank averages and updates its share of the parameters, in one copy of
// them that the node's ranks share, and the optimizer's state exists once. The results are torch's own, up to rounding,
// but for a weight listed twice, which is stepped once; a checkpoint of one serves the other at any number of ranks.
//
// Several optimizers may step the same parameters. Of those that could be fused with the averaging of a model's
// gradients, the last one that was prepared is. All prepared optimizers step with averages of what backward() has made,
// in whatever order, also after passes in no_sync() alone. What the program itself puts into .grad, as from
// autograd::grad(), only a fused optimizer averages: make it the same on all ranks (session.mean).
//
// A closure is called once by torch's SGD, Adam, AdamW, RMSprop and Adagrad. Every other type gets one that it may call
// as often as it likes: each call averages the gradients and gives the mean of the ranks' losses, weighted as gradients
// are, so that a line search (LBFGS) is the same on all ranks.
//
// While an optimizer is fused, .grad holds this rank's own gradients from backward() until average_gradients(), also
// after step(). To read averages, to clip them by hand or to step an optimizer that is not prepared, call
// average_gradients() first; GradScaler::unscale_() does so by itself. max_grad_norm needs none of this and costs less.
// If gradients were changed without it, the next step() is an Error (ExitCode::user_error) that names the parameter. Of
// what is written past torch's count of writes, as clip_grad_value_() does, a sample is looked at (one cache line of
// every 4 KB): a change of a few elements may not be seen.
//
// Parameters, the optimizer's state, options and groups may be read and changed at any time outside of step() and
// backward() (in place, through data_ptr(), set_data()), on all ranks alike; the next step takes them as they are. A
// fused step takes their values and moves them back into memory of its own. So parameters that are to stay views of one
// buffer need Fuse::never, and a step overwrites tensors that .data() gave before it, also after a set_data(). If a
// fused optimizer finds in its step that the ranks have written different values, or have different options, that is an
// Error too, and nothing is written: an optimizer that is not prepared and steps with this rank's own gradients ends
// so, and sharpness-aware minimisation without average_gradients(). Optimizers that are not fused do not look.
//
// An option that cannot be fused (amsgrad of a state that is loaded), a group of other parameters, or an unfrozen
// parameter that the optimizer does not have ends the fusing, without a change of results. A parameter whose memory
// another tensor has when it is to be fused (another parameter, a view, detach()) stays where it is, and the optimizer
// is not fused. A pointer to that memory cannot be seen: take it afterwards. A child of fork() sees the steps of its
// parent: one that reads the weights takes copies first (clone()). A step between two backward() of one retained graph
// is torch's Error about a change in place, as from Python. Where training goes on while it is saved
// (CheckpointConfig::async_save), a step of a fused optimizer may move parameters: take views and pointers anew.
#pragma once

#include <muster/json.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace torch::optim {
class Optimizer;
}

namespace muster {

enum class Fuse {
  automatic,  ///< where it is possible and the model is large enough to gain
  always,     ///< where it is possible
  never,
};

struct OptimizerOptions {
  /// The averaged gradients of all parameters together are scaled down to this 2-norm; 0: they are left as they are.
  double max_grad_norm = 0;
  /// Possible: SGD, Adam and AdamW (without amsgrad) over all parameters of one prepared model, in float or double, on
  /// the CPUs of one node, none of which shares its memory with another tensor.
  Fuse fuse = Fuse::automatic;
};
void to_json(Json& json, const OptimizerOptions& options);
void from_json(const Json& json, OptimizerOptions& options);

namespace detail::optim {

/// What stands behind a prepared optimizer.
class OptimizerStep {
 public:
  using Closure = std::function<at::Tensor()>;

  virtual ~OptimizerStep() = default;
  /// `plain` is the optimizer's own step. Collective.
  virtual at::Tensor step(torch::optim::Optimizer& optimizer, const Closure& closure,
                          const std::function<at::Tensor(Closure)>& plain) = 0;
  /// Collective.
  virtual void average_gradients(torch::optim::Optimizer& optimizer) = 0;
  virtual double grad_norm() const noexcept = 0;
  virtual bool fused() const noexcept = 0;
  virtual std::int64_t skipped_steps() const noexcept = 0;
};

/// What all prepared optimizers are, whatever else they are.
class Prepared {
 public:
  explicit Prepared(std::unique_ptr<OptimizerStep> step) : step_(std::move(step)) {}
  const OptimizerStep& prepared_step() const noexcept { return *step_; }

 protected:
  std::unique_ptr<OptimizerStep> step_;
};

}  // namespace detail::optim

/// The optimizer `O`, prepared.
template <class O>
class PreparedOptimizer : public O, public detail::optim::Prepared {
 public:
  PreparedOptimizer(O optimizer, std::unique_ptr<detail::optim::OptimizerStep> step)
      : O(std::move(optimizer)), Prepared(std::move(step)) {}

  /// Collective.
  at::Tensor step(std::function<at::Tensor()> closure = nullptr) override {
    return step_->step(*this, closure, [this](std::function<at::Tensor()> own) { return O::step(std::move(own)); });
  }
  /// After backward(): the .grad of its parameters hold the averages, also where the optimizer is fused. To look at
  /// them, or to change them, before step(). Collective.
  void average_gradients() { step_->average_gradients(*this); }
  /// The norm of the averaged gradients in the last step, before they were scaled down. 0 without max_grad_norm.
  double grad_norm() const noexcept { return step_->grad_norm(); }
  /// Whether step() averages gradients and updates parameters at once.
  bool fused() const noexcept { return step_->fused(); }
  /// Steps that were left out for their gradients (FailureConfig::bad_numbers): a schedule by steps may want to know.
  std::int64_t skipped_steps() const noexcept { return step_->skipped_steps(); }
};

}  // namespace muster
