#include "optim/optimizer_step.hpp"

#include "gradients/data_parallel.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "optim/fused_step.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <set>
#include <utility>

namespace muster::detail::optim {
namespace {

/// Parameters of fewer bytes than this stay in the caches, where fusing gains nothing.
constexpr std::size_t least_bytes = std::size_t{16} << 20;

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

std::set<const void*> identities(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> identities;
  for (const auto& tensor : tensors) identities.insert(tensor.unsafeGetTensorImpl());
  return identities;
}

class Step final : public OptimizerStep {
 public:
  Step(std::shared_ptr<gradients::Reducer> reducer, const OptimizerOptions& options)
      : reducer_(std::move(reducer)), options_(options) {}
  ~Step() override {
    if (const auto reducer = reducer_.lock()) reducer->set_fused(false);
  }

  /// Fuses if that is possible with what the reducer and the optimizer are now. Collective.
  void fuse(torch::optim::Optimizer& optimizer) {
    if (fused_) fused_->release(optimizer);
    fused_.reset();
    const auto reducer = reducer_.lock();
    if (!reducer) return;
    const auto gradients = options_.fuse == Fuse::never ? nullptr : reducer->fusable();
    const int states = states_of(optimizer);
    if (gradients && states >= 0) {
      auto parameters = reducer->dense_parameters();
      std::size_t bytes = 0;
      for (const auto& parameter : parameters) bytes += parameter.nbytes();
      const bool gains = options_.fuse == Fuse::always || bytes >= least_bytes;
      if (gains && owns(optimizer, parameters) && FusedStep::fits(parameters))
        fused_ = FusedStep::make(*gradients, std::move(parameters), states);
    }
    gradients_ = gradients;
    reducer->set_fused(fused_ != nullptr);
  }

  at::Tensor step(torch::optim::Optimizer& optimizer, const Closure& closure,
                  const std::function<at::Tensor(Closure)>& plain) override {
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr) {
      if (options_.max_grad_norm > 0)
        throw Error(ExitCode::usage, "stepping LBFGS", "its gradients cannot be scaled down between its evaluations",
                    "Prepare it without max_grad_norm");
      return plain(closure);
    }
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    const auto reducer = reducer_.lock();
    if (fused_ && reducer && (gradients_.expired() || !serves(optimizer))) {
      if (reducer->awaits_step()) {
        reducer->begin_step();
        reducer->end_step(/*fetch=*/true);
      }
      fuse(optimizer);
    }
    if (fused_ && reducer) {
      fused_->prepare(optimizer);
      reducer->begin_step();
      grad_norm_ = fused_->step(optimizer, options_.max_grad_norm);
      reducer->end_step();
    } else {
      if (options_.max_grad_norm > 0)
        grad_norm_ = torch::nn::utils::clip_grad_norm_(parameters_of(optimizer), options_.max_grad_norm);
      plain(nullptr);
    }
    return loss;
  }

  double grad_norm() const noexcept override { return grad_norm_; }
  bool fused() const noexcept override { return fused_ != nullptr; }

 private:
  /// Whether the optimizer steps these parameters and no others.
  static bool owns(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
    const auto stepped = parameters_of(optimizer);
    const auto known = identities(parameters), owned = identities(stepped);
    return std::ranges::includes(owned, known) && std::ranges::all_of(stepped, [&](const at::Tensor& parameter) {
             return !parameter.requires_grad() || known.contains(parameter.unsafeGetTensorImpl());
           });
  }

  /// Whether what is fused can do what the optimizer's options and groups ask for in this step.
  bool serves(torch::optim::Optimizer& optimizer) const {
    const int states = states_of(optimizer);
    return states >= 0 && states <= fused_->states() && owns(optimizer, fused_->parameters());
  }

  std::weak_ptr<gradients::Reducer> reducer_;
  OptimizerOptions options_;
  std::unique_ptr<FusedStep> fused_;
  std::weak_ptr<gradients::FusableGradients> gradients_;  ///< what it works on; gone with its exchange
  double grad_norm_ = 0;
};

/// The reducer that knows one of the optimizer's parameters.
std::shared_ptr<gradients::Reducer> reducer_of(torch::optim::Optimizer& optimizer,
                                               const std::vector<std::shared_ptr<gradients::DataParallel>>& models) {
  const auto owned = identities(parameters_of(optimizer));
  for (const auto& model : models)
    if (const auto& reducer = model->reducer())
      for (const auto& parameter : reducer->dense_parameters())
        if (owned.contains(parameter.unsafeGetTensorImpl())) return reducer;
  return nullptr;
}

}  // namespace

std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::DataParallel>>& models,
                                                   const OptimizerOptions& options) {
  if (options.max_grad_norm < 0)
    throw Error(ExitCode::usage, "preparing the optimizer", "max_grad_norm is negative", "Give a norm, or 0 for none");
  auto step = std::make_unique<Step>(reducer_of(optimizer, models), options);
  step->fuse(optimizer);
  return step;
}

}  // namespace muster::detail::optim
