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
// While it is fused, .grad holds this rank's own gradients between backward() and step(): clip by max_grad_norm, not by
// hand.
//
// Between steps, parameters, the optimizer's state, options and groups may be read and changed, in any way (in place,
// through data_ptr(), set_data()), on all ranks alike; the next step takes them as they are. What was changed on some
// ranks only: with a fused optimizer all ranks go on with the same values, but of each piece those of the rank that
// happens to update it; otherwise each rank goes on with its own. An option that cannot be fused (amsgrad of a state
// that is loaded) or a group of other parameters ends the fusing, without a change of results.
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
  /// the CPUs of one node.
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
  virtual double grad_norm() const noexcept = 0;
  virtual bool fused() const noexcept = 0;
  virtual std::int64_t skipped_steps() const noexcept = 0;
};

}  // namespace detail::optim

/// The optimizer `O`, prepared.
template <class O>
class PreparedOptimizer : public O {
 public:
  PreparedOptimizer(O optimizer, std::unique_ptr<detail::optim::OptimizerStep> step)
      : O(std::move(optimizer)), step_(std::move(step)) {}

  /// Collective.
  at::Tensor step(std::function<at::Tensor()> closure = nullptr) override {
    return step_->step(*this, closure, [this](std::function<at::Tensor()> own) { return O::step(std::move(own)); });
  }
  /// The norm of the averaged gradients in the last step, before they were scaled down. 0 without max_grad_norm.
  double grad_norm() const noexcept { return step_->grad_norm(); }
  /// Whether step() averages gradients and updates parameters at once.
  bool fused() const noexcept { return step_->fused(); }
  /// Steps that were left out for their gradients (FailureConfig::bad_numbers): a schedule by steps may want to know.
  std::int64_t skipped_steps() const noexcept { return step_->skipped_steps(); }

 private:
  std::unique_ptr<detail::optim::OptimizerStep> step_;
};

}  // namespace muster
