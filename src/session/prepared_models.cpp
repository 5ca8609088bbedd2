#include "session/prepared_models.hpp"

#include "gradients/hooks.hpp"
#include "gradients/reducer.hpp"

#include <torch/nn/module.h>

namespace muster::detail::session {
namespace {

using Models = std::vector<std::shared_ptr<gradients::DataParallel>>;

/// Calls `visit` with each model's reducer. A model without one has nothing to average.
template <class Visit>
void for_each_reducer(const Models& models, const Visit& visit) {
  for (const auto& model : models)
    if (const auto reducer = model->reducer()) visit(*reducer);
}

}  // namespace

std::int64_t PreparedModels::gradient_average_count() const {
  std::int64_t averaged = 0;
  for_each_reducer(models_, [&](auto& reducer) { averaged += reducer.averaged_pass_count(); });
  return averaged;
}

void PreparedModels::synchronise_buffers() const {
  for (const auto& model : models_) model->synchronise_buffers();
}

void PreparedModels::load_buffers_of(int micro_batch) const {
  for (const auto& model : models_) model->load_buffers_of(micro_batch);
}

void PreparedModels::for_each_parameter(const std::function<void(const std::string& name, const at::Tensor& values,
                                                                 const at::Tensor& gradient)>& visit) const {
  for (std::size_t i = 0; i < models_.size(); ++i) {
    const auto* const module = models_[i]->module();
    gradients::fetch_averages(module->parameters());
    for (const auto& parameter : module->named_parameters())
      visit((models_.size() > 1 ? std::to_string(i) + "/" : "") + parameter.key(), parameter.value(),
            parameter.value().grad());
  }
}

bool PreparedModels::any_joined() const {
  bool joined = false;
  for_each_reducer(models_, [&](auto& reducer) { joined = joined || reducer.is_joined(); });
  return joined;
}

void PreparedModels::finish_abandoned_passes() const {
  for_each_reducer(models_, [](auto& reducer) { reducer.finish_abandoned_passes(); });
}

bool PreparedModels::any_stop_requested() const {
  bool asked = false;
  for_each_reducer(models_, [&](auto& reducer) { asked = asked || reducer.any_stop_requested(); });
  return asked;
}

bool PreparedModels::have_no_gradient_to_save() const {
  bool none = true;
  // Not short-circuited: each reducer must see this boundary.
  for_each_reducer(models_, [&](auto& reducer) { none = reducer.has_no_gradient_to_save() && none; });
  return none;
}

}  // namespace muster::detail::session
