// The part of the reducer for fused optimizers. backward() leaves this rank's own gradients in .grad and marks them.
// The optimizer's step, or another reader of the averages, gives them to the exchange later.
#include "base/text.hpp"
#include "comm/progress.hpp"
#include "gradients/reducer_parameter.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::gradients {

void Reducer::set_fused(FusedOptimizer* optimizer) {
  const auto before = std::exchange(fused_, optimizer);
  if (before != nullptr && before != optimizer) before->on_unfused();
}

/// Called when the fused optimizer that would have averaged .grad is gone: the round that now begins averages it
/// instead.
void Reducer::average_local_gradients() {
  has_local_gradients_ = false;
  phase_ = Phase::idle;
  for (auto& p : parameters_) {
    note_manual_change(p);
    p.pending |= p.dense() && p.tensor.grad().defined() && !p.padding;
    p.mark.reset();
    p.altered = false;
  }
}

/// Called when backward() has left this rank's own gradients in .grad. Gradients with a weight are not for the fused
/// optimizer, but they are marked, too: the mark tells a sum that is zero from a gradient that was discarded.
void Reducer::mark_gradients() {
  has_local_gradients_ = has_local_gradients_ || !weights_.given;
  for (auto& p : parameters_)
    if ((p.dense() || weights_.given) && p.tensor.grad().defined() && !p.mark) p.mark = mark_of(p);
}

/// Call it before muster adds to the parameter's .grad or averages it. Records whether the program has changed .grad
/// since it was marked. A gradient that zero_grad() has removed or set to zero does not count as changed.
void Reducer::note_manual_change(Parameter& parameter) {
  auto gradient = parameter.tensor.grad();
  const double scale = std::exchange(parameter.scale, 1.0);
  if (!gradient.defined()) {
    parameter.altered = false;
    return;
  }
  if (!parameter.mark) return;
  if (!(mark_of(parameter) == *parameter.mark)) {
    parameter.altered = has_local_gradients_ && any_nonzero(gradient);
  } else if (scale != 1.0) {
    const at::NoGradGuard no_grad;
    gradient.mul_(scale);
    parameter.mark = mark_of(parameter);
  }
}

void Reducer::before_own_change(Parameter& parameter) {
  note_manual_change(parameter);
  parameter.mark.reset();
}

void Reducer::before_own_change() {
  for (auto& p : parameters_) before_own_change(p);
}

/// Throws the Error that names the first changed gradient and its rank. Collective.
void Reducer::throw_changed() {
  const auto& communicator = dense_->fusable()->communicator();
  const auto altered = std::ranges::find(parameters_, true, &Parameter::altered);
  const auto of_ranks = communicator.all_gather(altered == parameters_.end() ? std::string() : altered->name);
  for (auto& p : parameters_) p.altered = false;
  const auto first = std::ranges::find_if(of_ranks, [](const auto& name) { return !name.empty(); });
  throw Error(
      ExitCode::user_error, averaging,
      str("the gradient of parameter ", *first, " on rank ", first - of_ranks.begin(),
          " was changed after backward(), before it was averaged, since an optimizer is fused with the averaging"),
      "Clip by OptimizerOptions::max_grad_norm; or call the optimizer's average_gradients() before the change; "
      "or prepare it with Fuse::never");
}

void Reducer::begin_step(std::uint32_t word) {
  if (phase_ != Phase::awaiting_step) {
    // No backward() has run since the last step, so .grad holds what the program has put there.
    finish_abandoned_rounds();
    check_parameters();
    for (auto& p : parameters_) {
      before_own_change(p);
      p.altered = false;
    }
  }
  give_gradients(averages_stepped, word);
}

GradientMark Reducer::mark_of(const Parameter& parameter) const {
  return GradientMark(parameter.tensor.grad(), parameter.dense() && dense_->holds(parameter.index) ? 1 : 0);
}

/// True if the exchange was given the parameter's gradient as it is now, with the use that the step has of it.
bool Reducer::is_as_given(const Parameter& p) const {
  if (p.given != p.use_in_step() || p.scale != 1.0) return false;
  return p.given == ParameterUse::unused || (p.mark && mark_of(p) == *p.mark);
}

/// Ends the part of the dense exchange that a round has begun early, if it has; true if the exchange goes on with it.
/// `valid`: true if this rank's gradients are as they were given. Collective.
bool Reducer::end_early(bool valid, Flags flags, std::uint32_t word) {
  if (early_ == Early::no) return false;
  comm::require_progress(averaging, "");  // a child of fork() must not wait for its parent's thread
  valid = valid && early_ == Early::begun;
  early_ = Early::no;
  return dense_->fusable()->go_on(valid, flags, word);
}

/// `purpose`: averages_fetched or averages_stepped.
void Reducer::give_gradients(Flags purpose, std::uint32_t word) {
  bool altered = false, as_given = true;
  for (auto& p : parameters_) {
    if (p.dense() && p.tensor.grad().defined()) p.check_gradient();
    as_given = as_given && (!p.dense() || is_as_given(p));
    note_manual_change(p);
    altered |= p.altered;
  }
  const auto all_flags = flags() | purpose | gradients_unweighted | (altered ? gradients_changed : 0);
  if (end_early(as_given && !altered, all_flags, word)) return;
  auto* const fusable = dense_->fusable();
  do {
    dense_->begin(Arrival::left, all_flags, 0);
    if (fusable != nullptr) fusable->set_check_word(word);
    for (const auto& p : parameters_)
      if (p.dense()) dense_->add(p.index, p.tensor.grad(), p.use_in_step());
    // A rank that has not given gradients early must begin again with those that have, and found theirs stale.
  } while (fusable != nullptr && fusable->averages_early() && !fusable->go_on(true, all_flags, word));
}

void Reducer::end_step(double scale) {
  end_exchange(/*fetch=*/false);
  if (scale == 1.0) return;
  for (auto& p : parameters_)
    if (p.dense() && p.tensor.grad().defined()) {
      p.scale = scale;
      p.mark = mark_of(p);
      if (!has_local_gradients_) note_manual_change(p);  // applies the scale now, since anybody may read averages
    }
}

void Reducer::end_exchange(bool fetch) {
  phase_ = Phase::idle;
  count_round(dense_->flags());
  for (const auto& p : parameters_)
    if (p.dense())
      user_count(p);  // throws if a rank has abandoned the round; that rank would not take part in what follows
  require_weights_alike(dense_->flags());
  if (has_both(dense_->flags(), averages_fetched, averages_stepped))
    throw Error(ExitCode::user_error, averaging,
                "some ranks step the optimizer that is fused with the averaging, while others average without it",
                "Call step(), average_gradients() and others that read averages in the same order on all ranks");
  if ((dense_->flags() & gradients_changed) != 0) throw_changed();
  begun_since_step_ = false;
  for (auto& p : parameters_)
    if (p.dense()) finish_gradient(p, fetch);
}

void Reducer::fetch_averages() {
  average_accumulated();
  if (!has_local_gradients_) return;
  if (phase_ != Phase::awaiting_step) finish_abandoned_rounds();
  give_gradients(averages_fetched, 0);
  dense_->finish();
  has_local_gradients_ = false;
  for (auto& p : parameters_) p.mark.reset();
  end_exchange(/*fetch=*/true);
}

}  // namespace muster::detail::gradients
