#include "session/prepared_models.hpp"

#include "base/log.hpp"
#include "gradients/hooks.hpp"
#include "gradients/reducer.hpp"
#include "state/collect.hpp"
#include "state/fingerprint.hpp"
#include "state/stateful.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <array>
#include <optional>
#include <span>
#include <utility>

namespace muster::detail::session {
namespace {

using Models = std::vector<std::shared_ptr<gradients::PreparedModel>>;

/// Calls `visit` with each model's reducer. Leaves out models without one: their gradients are not averaged.
template <class Visit>
void for_each_reducer(const Models& models, const Visit& visit) {
  for (const auto& model : models)
    if (const auto reducer = model->reducer()) visit(*reducer);
}

/// Returns the average of the parameter's .grad over the workers, dense; a worker without a gradient counts as zeros.
/// If all workers have the same gradient, returns it unchanged. Collective.
at::Tensor average_of_gradient(const at::Tensor& parameter, const Communicator& control) {
  auto gradient = parameter.grad().defined() ? parameter.grad().detach() : at::zeros_like(parameter);
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  const auto fingerprint = static_cast<std::int64_t>(state::fingerprint(gradient));
  std::array<std::int64_t, 2> least{fingerprint, ~fingerprint};
  control.all_reduce(std::span(least), ReduceOp::min);
  if (least[0] == ~least[1]) return gradient;
  const auto numbers = gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
  const auto sum = numbers.to(at::TensorOptions(at::kCPU).dtype(at::kDouble), /*non_blocking=*/false, /*copy=*/true)
                       .contiguous();  // in double, since the sum may overflow a type of 16 bits
  control.all_reduce(std::span(sum.data_ptr<double>(), static_cast<std::size_t>(sum.numel())));
  auto average = at::zeros_like(gradient);
  (gradient.is_complex() ? at::view_as_real(average) : average).copy_(sum.div_(control.size()));
  return average;
}

}  // namespace

std::int64_t PreparedModels::gradient_average_count() const {
  std::int64_t averaged = 0;
  for_each_reducer(models_, [&](auto& reducer) { averaged += reducer.averaged_round_count(); });
  return averaged;
}

std::int64_t PreparedModels::gradient_count() const {
  auto count = gradient_average_count();
  for_each_reducer(models_, [&](auto& reducer) { count += reducer.begun_round_count(); });
  return count;
}

void PreparedModels::synchronise_statistics() const {
  for (const auto& model : models_) model->synchronise_buffers();
}

void PreparedModels::load_buffers_of(int micro_batch) const {
  for (const auto& model : models_) model->load_buffers_of(micro_batch);
}

void PreparedModels::for_each_parameter(const std::function<void(const std::string& name, const at::Tensor& values,
                                                                 const at::Tensor& gradient)>& visit) const {
  for (std::size_t i = 0; i < models_.size(); ++i) {
    const auto* const module = models_[i]->module();
    // Not while gradients accumulate with weights of the program: fetch_averages() would end the accumulation, and
    // logging must not change training.
    const auto reducer = models_[i]->reducer();
    if (!reducer || !reducer->accumulates_with_weights()) gradients::fetch_averages(module->parameters());
    for (const auto& parameter : module->named_parameters())
      visit(str(models_.size() > 1 ? str(i, "/") : "", parameter.key()), parameter.value(), parameter.value().grad());
  }
}

bool PreparedModels::any_joined() const {
  bool joined = false;
  for_each_reducer(models_, [&](auto& reducer) { joined = joined || reducer.is_joined(); });
  return joined;
}

void PreparedModels::finish_abandoned_rounds() const {
  for_each_reducer(models_, [](auto& reducer) { reducer.finish_abandoned_rounds(); });
}

bool PreparedModels::any_stop_requested() const {
  bool asked = false;
  for_each_reducer(models_, [&](auto& reducer) { asked = asked || reducer.any_stop_requested(); });
  return asked;
}

bool PreparedModels::have_no_gradient_to_save() const {
  bool none = true;
  // All reducers are asked in any case, since each records this boundary.
  for_each_reducer(models_, [&](auto& reducer) { none = reducer.with_gradient_to_save().empty() && none; });
  return none;
}

std::set<const void*> PreparedModels::averaged_parameters() const {
  std::set<const void*> averaged;
  for (const auto& model : models_)
    if (model->reducer())
      for (const auto& parameter : model->module()->parameters()) averaged.insert(parameter.unsafeGetTensorImpl());
  return averaged;
}

void PreparedModels::add_gradients(StateDict& state, const StateEntries& entries, const Communicator& control) const {
  std::set<const void*> waiting;
  for_each_reducer(models_, [&](auto& reducer) {
    for (const auto& parameter : reducer.with_gradient_to_save()) waiting.insert(parameter.unsafeGetTensorImpl());
  });
  bool accumulates_with_weights = false;  // the same on all workers
  for_each_reducer(models_, [&](auto& reducer) {
    accumulates_with_weights = accumulates_with_weights || reducer.accumulates_with_weights();
  });
  const bool has_any = !waiting.empty() || accumulates_with_weights;
  if (control.all_reduce(std::int64_t{has_any}, ReduceOp::max) == 0) return;
  const at::NoGradGuard no_grad;
  const auto paths = state::parameter_paths(entries);
  for (const auto& model : models_) {
    const auto reducer = model->reducer();
    if (!reducer) continue;
    std::map<std::string, at::Tensor> parameters;  // the same on all workers
    for (const auto& parameter : model->module()->parameters())
      if (const auto path = paths.find(parameter.unsafeGetTensorImpl()); path != paths.end())
        parameters.emplace(path->second, parameter);
    if (parameters.empty()) continue;
    const auto mine = reducer->local_weights().value_or(gradients::Reducer::LocalWeights());
    if (reducer->has_averages_aside() && control.rank() == 0)
      log::warn(
          "saving gradients that wait for a step: those that were averaged before session.no_sync() are left out, "
          "since the batches in it have weights");
    const double sum = control.all_reduce(mine.sum), unit = control.all_reduce(mine.unit, ReduceOp::max);
    if (sum > 0)
      state.tensors.emplace(state::weights_path(parameters.begin()->first), at::tensor({sum, unit}, at::kDouble));
    std::vector<std::int64_t> waits;
    // If the program gives weights, a gradient of zeros counts in the mean, so every .grad is saved.
    for (const auto& [path, parameter] : parameters)
      waits.push_back(sum > 0 ? parameter.grad().defined() : waiting.contains(parameter.unsafeGetTensorImpl()));
    control.all_reduce(std::span(waits), ReduceOp::max);
    auto any_waits = waits.begin();
    for (const auto& [path, parameter] : parameters)
      if (*any_waits++ != 0) state.tensors.emplace(state::gradient_path(path), average_of_gradient(parameter, control));
  }
}

void PreparedModels::add(std::shared_ptr<gradients::PreparedModel> model) {
  models_.push_back(std::move(model));
  if (restored_) restore_gradients_of(*models_.back());
}

void PreparedModels::restore_gradients(const StateEntries& entries, state::SavedGradients saved, int workers) {
  restored_ = {state::parameter_paths(entries), {}, std::move(saved), workers};
  for (const auto& [name, entry] : entries)
    for (const auto& [path, parameter] : entry.object()->parameters())
      restored_->parameters.emplace_back(parameter.getIntrusivePtr());
  for (const auto& model : models_) restore_gradients_of(*model);
  auto& left = restored_->saved.gradients;
  // Copied, since the tensors are views of a checkpoint's file, which may be pruned before these models are prepared.
  for (auto& [path, gradient] : left) gradient = gradient.clone();
  if (left.empty()) restored_.reset();
}

void PreparedModels::restore_gradients_of(const gradients::PreparedModel& model) {
  const auto reducer = model.reducer();
  if (!reducer) return;
  auto& [paths, held, saved, workers] = *restored_;
  std::optional<gradients::Reducer::LocalWeights> weights;
  std::map<const void*, at::Tensor> of_parameters;
  for (const auto& parameter : model.module()->parameters()) {
    const auto path = paths.find(parameter.unsafeGetTensorImpl());
    if (path == paths.end()) continue;
    const auto gradient = saved.gradients.find(path->second);
    of_parameters.emplace(path->first, gradient == saved.gradients.end() ? at::Tensor() : gradient->second);
    if (gradient != saved.gradients.end()) saved.gradients.erase(gradient);
    if (const auto found = saved.weights.find(path->second); found != saved.weights.end())
      weights = {found->second[0].item<double>() / workers, found->second[1].item<double>()};
  }
  // Each worker gets an equal part of the saved sum of weights, so it gets an equal part of the sum of the gradients,
  // too: the saved average times the number of workers that saved it, divided by the present number.
  if (weights && workers != saved.workers)
    for (auto& [parameter, gradient] : of_parameters)
      if (gradient.defined()) gradient = gradient * (static_cast<double>(saved.workers) / workers);
  reducer->restore_gradients(of_parameters, weights);
}

}  // namespace muster::detail::session
