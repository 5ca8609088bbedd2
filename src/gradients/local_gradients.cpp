#include "gradients/local_gradients.hpp"

#include "base/text.hpp"
#include "gradients/shared_exchange.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::gradients {

bool LocalGradients::begin_round(bool averages) {
  // Every rank does this, even a rank whose last round an exception has ended, since the ranks later compare what the
  // optimizer records here.
  const bool is_first = rounds_ == 0;
  if (optimizer_ != nullptr && !is_first) optimizer_->on_second_round();
  rounds_ += averages;
  return is_first;
}

void LocalGradients::mark_all(bool weighted) {
  any_ = any_ || !weighted;
  for (std::size_t i = 0; i < marked_.size(); ++i)
    if ((exchanges_.has_dense(i) || weighted) && parameters_[i].tensor.grad().defined() && !marked_[i].mark) mark(i);
}

void LocalGradients::unmark_all() {
  any_ = false;
  for (auto& marked : marked_) marked.mark.reset();
}

bool LocalGradients::is_as_marked(std::size_t parameter) const {
  const auto& mark = marked_[parameter].mark;
  return mark && mark_of(parameter) == *mark;
}

bool LocalGradients::is_kept(std::size_t parameter) const {
  const auto& gradient = parameters_[parameter].tensor.grad();
  return gradient.defined() && (is_as_marked(parameter) || any_nonzero(gradient));
}

bool LocalGradients::is_as_given(std::size_t parameter, ParameterUse use_in_step) const {
  const auto given = exchanges_.given_use(parameter);
  if (given != use_in_step || marked_[parameter].scale != 1.0) return false;
  return given == ParameterUse::unused || is_as_marked(parameter);
}

void LocalGradients::note_manual_change(std::size_t parameter) {
  auto& own = marked_[parameter];
  auto gradient = parameters_[parameter].tensor.grad();
  const double scale = std::exchange(own.scale, 1.0);
  if (!gradient.defined()) {
    own.altered = false;
    return;
  }
  if (!own.mark) return;
  if (!is_as_marked(parameter)) {
    own.altered = any_ && any_nonzero(gradient);
  } else if (scale != 1.0) {
    const at::NoGradGuard no_grad;
    gradient.mul_(scale);
    mark(parameter);
  }
}

void LocalGradients::forget_manual_changes() {
  for (auto& marked : marked_) marked.altered = false;
}

void LocalGradients::throw_changed() {
  const auto& communicator = exchanges_.dense().fusable()->communicator();
  const auto altered = std::ranges::find(marked_, true, &Marked::altered);
  const auto of_ranks = communicator.all_gather(
      altered == marked_.end() ? std::string() : parameters_[static_cast<std::size_t>(altered - marked_.begin())].name);
  forget_manual_changes();
  const auto first = std::ranges::find_if(of_ranks, [](const auto& name) { return !name.empty(); });
  throw Error(
      ExitCode::user_error, averaging,
      str("the gradient of parameter ", *first, " on rank ", first - of_ranks.begin(),
          " was changed after backward(), before it was averaged, since an optimizer is fused with the averaging"),
      "Clip by OptimizerOptions::max_grad_norm; or call the optimizer's average_gradients() before the change; "
      "or prepare it with Fuse::never");
}

void LocalGradients::scale_by(std::size_t parameter, double scale) {
  marked_[parameter].scale = scale;
  mark(parameter);
  if (!any_) note_manual_change(parameter);  // applies the scale now, since anybody may read averages
}

}  // namespace muster::detail::gradients
