// The part of the reducer for saves between two rounds: it finds the gradients that wait for an optimizer's step, and
// restores them.
#include "gradients/reducer_parameter.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

namespace muster::detail::gradients {
namespace {

constexpr std::size_t most_fingerprinted = 8;  ///< number of parameters that are sampled after every round

}  // namespace

/// Samples a few of the parameters that have a gradient, spread from the first to the last; all of them if gradients
/// waited for a step at the last with_gradient_to_save().
ParameterSamples Reducer::sample_parameters() const {
  std::vector<const at::Tensor*> trained;
  for (const auto& p : parameters_)
    if (p.tensor.grad().defined()) trained.push_back(&p.tensor);
  const auto count = any_left_ ? trained.size() : std::min(trained.size(), most_fingerprinted);
  std::vector<at::Tensor> some;
  for (std::size_t i = 0; i < count; ++i)
    some.push_back(*trained[count > 1 ? i * (trained.size() - 1) / (count - 1) : 0]);
  return ParameterSamples(std::move(some));
}

/// Called to detect steps of optimizers that are not prepared: such an optimizer has stepped if parameters have
/// changed.
void Reducer::note_change_of_parameters() {
  if (!after_backward_ || phase_ == Phase::awaiting_step || !after_backward_->changed()) return;
  for (auto& p : parameters_) p.awaits_step = p.awaits_step && !p.optimizer.expired();
}

/// Called at the start of a round: records whether the gradients that were left at the last with_gradient_to_save()
/// were discarded.
void Reducer::note_discarded() {
  note_change_of_parameters();
  for (auto& p : parameters_)
    if (std::exchange(p.left, false) && p.awaits_step)
      p.discarded = !p.tensor.grad().defined() || !any_nonzero(p.tensor.grad());
}

/// Called at the start of a round: records whether a new batch adds to gradients that wait for a step. Only the first
/// round of a batch counts: in a GAN, later rounds of a batch add to gradients that are then discarded.
void Reducer::note_addition() {
  if (adds_up_ || std::exchange(step_of_last_round_, steps_->global_step) == steps_->global_step) return;
  const auto is_added_to = [](const Parameter& p) {
    const auto& gradient = p.earlier.defined() ? p.earlier : p.tensor.grad();
    const bool is_cheap = p.tensor.numel() <= small_elements && p.tensor.is_cpu();
    return p.awaits_step && (p.discarded || is_cheap) && gradient.defined() && any_nonzero(gradient);
  };
  if (std::ranges::none_of(parameters_, is_added_to)) return;
  note_change_of_parameters();
  adds_up_ = std::ranges::any_of(parameters_, is_added_to);
}

void Reducer::note_optimizer(std::size_t parameter, const std::weak_ptr<const void>& optimizer) {
  parameters_[parameter].optimizer = optimizer;
}

void Reducer::note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer) {
  note_optimizer(parameter, optimizer);
  parameters_[parameter].awaits_step = false;
}

std::vector<at::Tensor> Reducer::with_gradient_to_save() {
  note_change_of_parameters();
  const bool prepared = std::ranges::any_of(parameters_, [](const Parameter& p) { return !p.optimizer.expired(); });
  any_left_ = false;
  std::vector<at::Tensor> waiting;
  for (auto& p : parameters_) {
    const bool counts = p.awaits_step && (!prepared || !p.optimizer.expired());
    p.left = counts && p.tensor.grad().defined() && any_nonzero(p.tensor.grad());
    any_left_ |= p.left;
    if (p.left && (adds_up_ || !p.discarded)) waiting.push_back(p.tensor);
  }
  return waiting;
}

std::optional<Reducer::LocalWeights> Reducer::local_weights() const {
  if (!accumulates_with_weights()) return {};
  const bool any = std::ranges::any_of(parameters_, [&](const auto& p) { return p.pending && holds_gradient(p); });
  return LocalWeights{any ? weights_.sum : 0, weights_.unit};
}

bool Reducer::has_averages_aside() const noexcept {
  return weights_.given && std::ranges::any_of(parameters_, [](const auto& p) { return p.earlier.defined(); });
}

void Reducer::restore_gradients(const std::map<const void*, at::Tensor>& saved,
                                const std::optional<LocalWeights>& weights) {
  const at::NoGradGuard no_grad;
  for (auto& p : parameters_) {
    const auto found = saved.find(p.tensor.unsafeGetTensorImpl());
    if (found == saved.end()) continue;
    clear_gradient(p);
    p.mark.reset();
    p.awaits_step = found->second.defined();
    if (!p.awaits_step) continue;
    auto gradient = at::empty_like(p.tensor).copy_(found->second);
    p.tensor.mutable_grad() = p.sparse ? gradient.to_sparse(1) : std::move(gradient);
    p.pending = weights.has_value();
    if (weights) p.mark = mark_of(p);
  }
  if (weights) {
    weights_ = {.given = true, .unit = weights->unit, .sum = weights->sum};
    last_round_was_no_sync_ = true;
  }
  after_backward_ = sample_parameters();
}

}  // namespace muster::detail::gradients
