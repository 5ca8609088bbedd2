#include "muster/ema.hpp"

#include "gradients/hooks.hpp"
#include "muster/error.hpp"
#include "optim/weight_averages.hpp"
#include "step/steps.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

namespace muster {
namespace detail::optim {
namespace {

/// The parameters of all models whose values are currently replaced by averages.
std::set<const c10::TensorImpl*>& with_averages() {
  static std::set<const c10::TensorImpl*> all;
  return all;
}

/// Makes the parameter use other values, which must have its type and device.
void set_values(at::Tensor& parameter, const at::Tensor& values) {
  parameter.set_data(values);
  torch::autograd::impl::bump_version(parameter);
}

}  // namespace

bool is_average(const at::Tensor& parameter) { return with_averages().contains(parameter.unsafeGetTensorImpl()); }

WeightAverages::WeightAverages(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options)
    : module_(std::move(module)), options_(options) {
  if (!(options_.decay >= 0 && options_.decay <= 1))
    throw Error(ExitCode::usage, "averaging weights", "decay is not from 0 to 1", "0.999 serves most models");
  std::map<const c10::TensorImpl*, std::size_t> known;
  for (const auto& item : module_->named_parameters()) {
    const auto& parameter = item.value();
    if (!parameter.defined()) continue;
    const auto [at, is_new] = known.try_emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
    names_.emplace(item.key(), at->second);
    if (!is_new) continue;
    parameters_.push_back(parameter);
    averages_.push_back(parameter.detach().to(type_of_average(parameter), /*non_blocking=*/false, /*copy=*/true));
  }
}

bool WeightAverages::is_applied() const { return std::ranges::any_of(parameters_, is_average); }

void WeightAverages::require_not_applied(const char* doing) const {
  if (is_applied())
    throw Error(ExitCode::user_error, doing, "averages are in the model, in place of the model's own weights",
                "End the scope of EMA::apply() before");
}

/// Until the first update, the averages follow the weights, since these may be loaded or broadcast after the EMA was
/// made.
void WeightAverages::copy_first() {
  if (updates_ > 0 || is_applied()) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) averages_[i].copy_(parameters_[i]);
}

void WeightAverages::update() {
  require_not_applied("updating an average of weights");
  if (!step::is_step_complete() || !std::ranges::all_of(parameters_, gradients::is_step_complete)) return;
  const at::NoGradGuard no_grad;
  if (updates_ == 0) {
    copy_first();
  } else {
    const auto n = static_cast<double>(updates_);
    const double decay = options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
    std::vector<at::Tensor> averages, weights;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (at::isIntegralType(averages_[i].scalar_type(), /*includeBool=*/true)) {
        averages_[i].copy_(parameters_[i]);
        continue;
      }
      averages.push_back(averages_[i]);
      weights.push_back(parameters_[i].detach().to(averages_[i].device(), averages_[i].scalar_type()));
    }
    if (!weights.empty()) at::_foreach_lerp_(averages, weights, 1 - decay);
  }
  ++updates_;
}

void WeightAverages::apply() {
  require_not_applied("applying an average of weights");
  copy_first();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own, averaged;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    own.push_back(parameters_[i].detach());
    averaged.push_back(averages_[i].to(parameters_[i].device(), parameters_[i].scalar_type()));
  }
  weights_ = std::move(own);
  for (const auto& parameter : parameters_) with_averages().insert(parameter.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < parameters_.size(); ++i) set_values(parameters_[i], averaged[i]);
  at::autocast::clear_cache();
}

void WeightAverages::restore() noexcept {
  for (std::size_t i = 0; i < parameters_.size(); ++i) set_values(parameters_[i], weights_[i]);
  at::autocast::clear_cache();
  for (const auto& parameter : parameters_) with_averages().erase(parameter.unsafeGetTensorImpl());
  weights_.clear();
}

std::map<std::string, at::Tensor> WeightAverages::averages() {
  copy_first();
  std::map<std::string, at::Tensor> named;
  for (const auto& [name, index] : names_) named.emplace(name, averages_[index]);
  return named;
}

std::map<std::string, at::Tensor> WeightAverages::buffers() const {
  std::map<std::string, at::Tensor> named;
  for (const auto& item : module_->named_buffers())
    if (item.value().defined()) named.emplace(item.key(), item.value());
  return named;
}

}  // namespace detail::optim

EMAScope::EMAScope(std::shared_ptr<detail::optim::WeightAverages> averages) : averages_(std::move(averages)) {
  averages_->apply();
}
EMAScope::~EMAScope() { averages_->restore(); }

EMA::EMA(std::shared_ptr<torch::nn::Module> module, const EMAOptions& options)
    : averages_(std::make_shared<detail::optim::WeightAverages>(std::move(module), options)) {}

void EMA::update() { averages_->update(); }
std::int64_t EMA::updates() const noexcept { return averages_->updates(); }
EMAScope EMA::apply() const { return EMAScope(averages_); }

}  // namespace muster
