#include "gradients/unstepped_gradients.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::gradients {
namespace {

constexpr std::size_t most_fingerprinted = 8;  ///< number of parameters that are sampled after every round

}  // namespace

void UnsteppedGradients::note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer) {
  note_optimizer(parameter, optimizer);
  all_[parameter].awaits_step = false;
}

/// Samples a few of the parameters that have a gradient, spread from the first to the last; all of them if gradients
/// waited for a step at the last to_save().
void UnsteppedGradients::sample_parameters() {
  std::vector<const at::Tensor*> trained;
  for (const auto& p : parameters_)
    if (p.tensor.grad().defined()) trained.push_back(&p.tensor);
  const auto count = any_left_ ? trained.size() : std::min(trained.size(), most_fingerprinted);
  std::vector<at::Tensor> some;
  for (std::size_t i = 0; i < count; ++i)
    some.push_back(*trained[count > 1 ? i * (trained.size() - 1) / (count - 1) : 0]);
  after_backward_ = ParameterSamples(std::move(some));
}

/// Called to detect steps of optimizers that are not prepared: such an optimizer has stepped if parameters have
/// changed.
void UnsteppedGradients::note_change_of_parameters() {
  if (!after_backward_ || rounds_.phase == Phase::awaiting_step || !after_backward_->changed()) return;
  for (auto& each : all_) each.awaits_step = each.awaits_step && !each.optimizer.expired();
}

void UnsteppedGradients::note_discarded() {
  if (!any_left_) return;
  note_change_of_parameters();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& gradient = parameters_[i].tensor.grad();
    if (std::exchange(all_[i].left, false) && all_[i].awaits_step)
      all_[i].discarded = !gradient.defined() || !any_nonzero(gradient);
  }
}

void UnsteppedGradients::note_addition(std::int64_t global_step,
                                       const std::function<const at::Tensor&(std::size_t)>& gradient_of) {
  if (adds_up_ || std::exchange(step_of_last_round_, global_step) == global_step) return;
  const auto any_added_to = [&] {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (!all_[i].awaits_step || !(all_[i].discarded || is_cheap_to_read(parameters_[i].tensor))) continue;
      if (const auto& gradient = gradient_of(i); gradient.defined() && any_nonzero(gradient)) return true;
    }
    return false;
  };
  if (!any_added_to()) return;
  note_change_of_parameters();
  adds_up_ = any_added_to();
}

std::vector<at::Tensor> UnsteppedGradients::to_save() {
  note_change_of_parameters();
  const bool prepared = std::ranges::any_of(all_, [](const Gradient& each) { return !each.optimizer.expired(); });
  any_left_ = false;
  std::vector<at::Tensor> waiting;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    auto& each = all_[i];
    const auto& tensor = parameters_[i].tensor;
    const bool counts = each.awaits_step && (!prepared || !each.optimizer.expired());
    each.left = counts && tensor.grad().defined() && any_nonzero(tensor.grad());
    any_left_ |= each.left;
    if (each.left && (adds_up_ || !each.discarded)) waiting.push_back(tensor);
  }
  return waiting;
}

}  // namespace muster::detail::gradients
