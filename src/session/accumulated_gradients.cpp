#include "session/accumulated_gradients.hpp"

#include "base/log.hpp"
#include "state/stateful.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::session {

void AccumulatedGradients::watch(const StateEntries& entries) {
  const auto known = prepared_.averaged_parameters();
  auto before = std::exchange(models_, {});
  for (const auto& [name, entry] : entries)
    for (const auto& [path, parameter] : entry.object()->parameters())
      if (parameter.requires_grad() && parameter.is_leaf() && !known.contains(parameter.unsafeGetTensorImpl()))
        models_[name].parameters.push_back(parameter);
  compare();
  for (auto& [name, model] : models_) model.accumulates = before[name].accumulates;
}

void AccumulatedGradients::compare() {
  if (const auto count = prepared_.all().size(); std::exchange(prepared_count_, count) != count) {
    const auto known = prepared_.averaged_parameters();  // models may have been prepared after watch()
    for (auto& [name, model] : models_)
      if (std::erase_if(model.parameters, [&](const auto& p) { return known.contains(p.unsafeGetTensorImpl()); }) > 0)
        model = {.parameters = model.parameters};
  }
  for (auto& [name, model] : models_) {
    const auto before = std::exchange(model.writes, {});
    for (const auto& parameter : model.parameters) {
      const auto& gradient = parameter.grad();
      model.writes.emplace_back(gradient.getIntrusivePtr(), gradient.defined() ? gradient._version() : 0);
    }
    const bool has_stepped = model.values && model.values->changed();
    if (has_stepped) model.accumulates = false;
    if (has_stepped || !model.values) model.values.emplace(model.parameters);
    if (has_stepped || model.writes == before) continue;
    model.accumulates = std::ranges::any_of(model.parameters, [](const at::Tensor& parameter) {
      return parameter.grad().defined() && gradients::any_nonzero(parameter.grad());
    });
  }
}

std::string AccumulatedGradients::find_unprepared() {
  compare();
  const auto found = std::ranges::find_if(models_, [](const auto& one) { return one.second.accumulates; });
  return found == models_.end() ? std::string() : found->first;
}

bool AccumulatedGradients::none() {
  // Both functions are called in any case, since both record this boundary.
  const bool none_prepared = prepared_.have_no_gradient_to_save(), none_else = find_unprepared().empty();
  const bool none = *prepared_.no_sync_depth() == 0 && none_prepared && none_else;
  boundaries_with_gradients_ = none ? 0 : boundaries_with_gradients_ + 1;
  return none;
}

void AccumulatedGradients::add_to(StateDict& state, const StateEntries& entries, const Communicator& control) {
  prepared_.add_gradients(state, entries, control);
  const auto name = find_unprepared();
  if (name.empty() || std::exchange(has_warned_, true) || control.rank() != 0) return;
  log::warn(
      "saving " + name +
      ": its gradients have not been stepped with, and they are not saved, since the model is not prepared: a run "
      "that resumes from here steps without them. Save right after an optimizer's step, or prepare the model "
      "with session.prepare_model()");
}

}  // namespace muster::detail::session
