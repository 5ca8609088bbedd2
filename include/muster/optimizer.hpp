// Optimizers that step together with the other ranks: session.prepare_optimizer.
//
//   auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 1e-3), {.max_grad_norm = 1.0});
//   …
//   optimizer.zero_grad();
//   loss.backward();
//   optimizer.step();
//
// A prepared optimizer still is the Adam that was given: schedulers, states and checkpoints take it as one. Where that
// is faster, the step is fused with the averaging of gradients: each rank averages and updates its share of the
// parameters, in one copy of them that the node's ranks share, and the optimizer's state exists only once (twice with
// CheckpointConfig::async_save). Over several nodes, each node has a copy of the parameters, but the state still exists
// only once: each node keeps the share that it updates (see gather_state()). The results are torch's own, up to
// rounding, except for a weight that is listed twice, which is stepped once. Checkpoints of fused and other optimizers
// can be exchanged, at any number of ranks.
//
// Several optimizers may step the same parameters. If more than one of them could be fused with the averaging of a
// model's gradients, the one that was prepared last is fused. All prepared optimizers step with the averages of the
// gradients from backward(), in any order, even if every backward() was in no_sync(). Gradients that the program writes
// into .grad, such as those of autograd::grad(), are averaged by a fused optimizer only: make them the same on all
// ranks (session.mean).
//
// torch's SGD, Adam, AdamW, RMSprop and Adagrad call a closure once. Every other type gets a closure that it may call
// as often as it likes: each call averages the gradients and returns the mean of the ranks' losses, weighted as the
// gradients are, so that a line search (LBFGS) is the same on all ranks.
//
// While an optimizer is fused, .grad holds this rank's own gradients from backward() until average_gradients(), even
// after step(). Call average_gradients() before you read averages, clip them by hand, or step an optimizer that is not
// prepared; GradScaler::unscale_() calls it itself. max_grad_norm needs none of this and costs less. If gradients were
// changed without average_gradients(), the next step() is an Error (ExitCode::user_error) that names the parameter.
// Writes that torch does not count, such as those of clip_grad_value_(), are detected by a sample (one cache line of
// every 4 KB), which may miss a change of a few elements. Gradients of batches with a weight (session.step(batch,
// weight)) are averaged in backward(); for a fused optimizer too, .grad holds their averages.
//
// Outside of step() and backward(), parameters and the optimizer's state, options and groups may be read and changed at
// any time (in place, through data_ptr(), by set_data()), but alike on all ranks; the next step uses them as they are.
// Over several nodes, call gather_state() first to read the state or to change a part of it.
// A fused step moves the values back into its own memory. So use Fuse::never for parameters that must remain views of
// one buffer. A step overwrites tensors that .data() returned before it, even after a set_data(). It is an Error, and
// nothing is written, if a fused optimizer finds in its step that the ranks have written different values or have
// different options. This happens when an optimizer that is not prepared steps with this rank's own gradients, and with
// sharpness-aware minimisation without average_gradients(). Optimizers that are not fused do not check this; each
// report compares the learning rates of all optimizers.
//
// An optimizer stops being fused, with the same results, when an option cannot be fused (such as amsgrad in a loaded
// state), when a group has other parameters, or when it lacks an unfrozen parameter. If another tensor (another
// parameter, a view, the result of detach()) shares a parameter's memory when the optimizer is to be fused, the
// parameter is not moved, and the optimizer is not fused. muster cannot see raw pointers to that memory: take them
// after the optimizer was fused. A child of fork() sees its parent's steps; if it reads the weights, it should first
// copy them (clone()). A step between two backward() of one retained graph is torch's Error about a change in place, as
// in Python. With asynchronous saving (CheckpointConfig::async_save), a step of a fused optimizer may move parameters:
// take views and pointers again after it.
#pragma once

#include <muster/detail/export.hpp>
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
  automatic,  ///< fuses if that is possible, on one node, if the parameters have at least 16 MiB: then it is faster
  always,     ///< fuses if that is possible
  never,
};

struct OptimizerOptions {
  /// The averaged gradients of all parameters together are scaled down to this 2-norm; 0: they are not scaled. An
  /// optimizer that calls its closure as often as it likes, such as LBFGS, throws an Error (ExitCode::usage) in step()
  /// if this is not 0.
  double max_grad_norm = 0;
  /// Fusing is possible for SGD, Adam and AdamW (without amsgrad) over all parameters of one prepared model, in float
  /// or double, on the CPUs of several ranks, if no parameter shares its memory with another tensor. Over several nodes
  /// only Fuse::always fuses, since a node then has only its share of the state: see gather_state().
  Fuse fuse = Fuse::automatic;
};

namespace detail::optim {

class OptimizerStep;

/// The base class of all prepared optimizers, whatever their type.
class MUSTER_API Prepared {
 public:
  Prepared(std::unique_ptr<OptimizerStep> step);
  Prepared(Prepared&&) noexcept;
  Prepared& operator=(Prepared&&) noexcept;
  ~Prepared();

  /// The 2-norm of the averaged gradients in the last step, before they were scaled down. 0 without max_grad_norm, and
  /// before the first step.
  double grad_norm() const noexcept;
  /// True if step() averages gradients and updates parameters in one operation.
  bool fused() const noexcept;
  /// Steps that were skipped because of their gradients (FailureConfig::bad_numbers); useful for schedules that count
  /// steps.
  std::int64_t skipped_steps() const noexcept;
  /// Over several nodes, a fused optimizer keeps a share of its state on each node. This function makes the whole
  /// state() readable on all ranks until the next step. Saves call it themselves; Checkpoint::from_dict() and
  /// state_dict() do not. On one node, or without fusing, it does nothing. Throws an Error (ExitCode::retry) if a node
  /// has no memory for it. After the session, step() is an Error unless the state was gathered in time. Collective.
  void gather_state();

 protected:
  using Closure = std::function<at::Tensor()>;
  /// Averages the gradients as the head of this file says, and steps. `plain`: step() of the optimizer's own type.
  /// Collective.
  at::Tensor take_step(torch::optim::Optimizer& optimizer, const Closure& closure,
                       const std::function<at::Tensor(Closure)>& plain);
  void average_gradients_of(torch::optim::Optimizer& optimizer);

 private:
  std::unique_ptr<OptimizerStep> step_;
};

}  // namespace detail::optim

/// The optimizer `O`, prepared.
template <class O>
class PreparedOptimizer : public O, public detail::optim::Prepared {
 public:
  PreparedOptimizer(O optimizer, detail::optim::Prepared prepared)
      : O(std::move(optimizer)), Prepared(std::move(prepared)) {}

  /// Steps together with the other ranks, as the head of this file says. Collective.
  at::Tensor step(std::function<at::Tensor()> closure = nullptr) override {
    return take_step(*this, closure, [this](std::function<at::Tensor()> own) { return O::step(std::move(own)); });
  }
  /// Call after backward(): then the .grad of the optimizer's parameters holds the averages, even if the optimizer is
  /// fused, so that they can be read or changed before step(). Collective.
  void average_gradients() { average_gradients_of(*this); }
};

}  // namespace muster
