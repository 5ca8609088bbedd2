// The part of the reducer for fused optimizers: backward() leaves and marks this rank's own gradients; the optimizer's
// step, or any other reader of the averages, gives them to the exchange.
#include "gradients/reducer_parameter.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::gradients {

void Reducer::set_fused(FusedOptimizer* optimizer) noexcept {
  const auto before = std::exchange(fused_, optimizer);
  if (before != nullptr && before != optimizer) before->end_fusing();
}

/// Called when the optimizer that was to average .grad is gone: the pass that begins averages it instead.
void Reducer::average_own() {
  own_ = false;
  state_ = State::idle;
  for (auto& p : parameters_) {
    note_change(p);
    p.pending |= p.dense() && p.tensor.grad().defined() && !p.padding;
    p.mark.reset();
    p.altered = false;
  }
}

/// Called when backward() has left this rank's own gradients in .grad.
void Reducer::mark_gradients() {
  own_ = true;
  for (auto& p : parameters_)
    if (p.dense() && p.tensor.grad().defined() && !p.mark) p.mark = GradientMark(p.tensor.grad());
}

/// Call it before the parameter's .grad is added to or averaged: notes if .grad was changed by hand since it was
/// marked. A gradient that any zero_grad() has discarded or zeroed does not count as changed.
void Reducer::note_change(Parameter& parameter) {
  auto gradient = parameter.tensor.grad();
  const double scale = std::exchange(parameter.scale, 1.0);
  if (!gradient.defined()) {
    parameter.altered = false;
    return;
  }
  if (!parameter.mark) return;
  if (!(GradientMark(gradient) == *parameter.mark)) {
    parameter.altered = own_ && any_nonzero(gradient);
  } else if (scale != 1.0) {
    const at::NoGradGuard no_grad;
    gradient.mul_(scale);
    parameter.mark = GradientMark(gradient);
  }
}

void Reducer::allow_change() {
  for (auto& p : parameters_) {
    note_change(p);
    p.mark.reset();
  }
}

/// Collective.
void Reducer::throw_changed() {
  const auto& communicator = dense_->fusable()->communicator();
  const auto altered = std::ranges::find(parameters_, true, &Parameter::altered);
  const auto of_ranks = communicator.all_gather(altered == parameters_.end() ? std::string() : altered->name);
  for (auto& p : parameters_) p.altered = false;
  const auto first = std::ranges::find_if(of_ranks, [](const auto& name) { return !name.empty(); });
  throw Error(ExitCode::user_error, averaging,
              "the gradient of parameter " + *first + " on rank " + std::to_string(first - of_ranks.begin()) +
                  " was changed after backward(), when it was that rank's own, since an optimizer is fused with the "
                  "averaging",
              "Clip by OptimizerOptions::max_grad_norm; or call the optimizer's average_gradients() before the change; "
              "or prepare it with Fuse::never");
}

void Reducer::begin_step(std::uint32_t word) {
  if (state_ != State::awaiting_step) {
    // No pass has run since the last step: .grad holds what the user has put there.
    recover();
    check_parameters();
    for (auto& p : parameters_) {
      note_change(p);
      p.mark.reset();
      p.altered = false;
    }
  }
  give_gradients(word);
}

void Reducer::give_gradients(std::uint32_t word) {
  bool altered = false;
  for (auto& p : parameters_) {
    if (p.dense() && p.tensor.grad().defined()) p.check_gradient();
    note_change(p);
    altered |= p.altered;
  }
  dense_->begin(Arrival::at_once, flags() | (altered ? gradients_changed : 0));
  if (auto* const fusable = dense_->fusable()) fusable->set_word(word);
  // As with torch's optimizers, every defined gradient takes part in the step.
  for (const auto& p : parameters_)
    if (p.dense())
      dense_->add(p.index, p.tensor.grad(), p.tensor.grad().defined() && !p.padding ? Use::used : Use::unused);
}

void Reducer::end_step(double scale) {
  end_exchange(/*fetch=*/false);
  if (scale == 1.0) return;
  for (auto& p : parameters_)
    if (p.dense() && p.tensor.grad().defined()) {
      p.scale = scale;
      p.mark = GradientMark(p.tensor.grad());
      if (!own_) note_change(p);  // applies the scale: averages may be read by anybody
    }
}

void Reducer::end_exchange(bool fetch) {
  state_ = State::idle;
  count_pass(dense_->flags());
  for (const auto& p : parameters_)
    if (p.dense()) users(p);  // throws if a rank has abandoned the pass; that rank would not take part in what follows
  if ((dense_->flags() & gradients_changed) != 0) throw_changed();
  begun_since_step_ = false;
  for (auto& p : parameters_)
    if (p.dense()) store(p, fetch);
}

void Reducer::fetch_averages() {
  end_adding_up();
  if (!own_) return;
  if (state_ != State::awaiting_step) recover();
  give_gradients(0);
  dense_->finish();
  own_ = false;
  for (auto& p : parameters_) p.mark.reset();
  end_exchange(/*fetch=*/true);
}

}  // namespace muster::detail::gradients
