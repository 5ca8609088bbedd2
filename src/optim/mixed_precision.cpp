#include "muster/mixed_precision.hpp"

#include "base/log.hpp"
#include "gradients/hooks.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "muster/state.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace muster {
namespace {

constexpr const char* unscaling = "unscaling gradients";

[[noreturn]] void refuse(std::string_view doing, std::string_view fact, std::string_view remedy) {
  throw Error(ExitCode::user_error, doing, fact, remedy);
}

/// True if the value is a valid scale. The scale is stored as a float.
bool is_scale(double value) { return static_cast<float>(value) > 0 && std::isfinite(static_cast<float>(value)); }

void check(const GradScalerOptions& options) {
  const auto require = [](bool holds, std::string_view fact) {
    if (!holds) throw Error(ExitCode::usage, "making a gradient scaler", fact, "torch's defaults serve most models");
  };
  require(is_scale(options.init_scale), "init_scale is not a finite number above 0");
  require(options.growth_factor > 1 && std::isfinite(options.growth_factor),
          "growth_factor is not a finite number above 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor is not between 0 and 1");
  require(options.growth_interval > 0, "growth_interval is not above 0");
}

/// Without AVX-512, torch computes 16-bit convolutions and matrix products in its own slow loops instead of oneDNN.
bool has_fast_16_bits() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return true;
#endif
}

void warn_if_slow(at::DeviceType device, const AutocastOptions& options) {
  static std::once_flag warned;
  if (options.enabled && device == at::kCPU && !has_fast_16_bits())
    std::call_once(warned, [&] {
      detail::log::warn(
          detail::str("Autocast computes in ", c10::toString(options.dtype),
                      ", for which this processor has no fast instructions (AVX-512): convolutions take many times "
                      "as long as in float. Switch autocast off with enabled = false"));
    });
}

/// All tensors of one kind can be passed to torch's kernel in one call.
using Kind = std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>;

}  // namespace

namespace autocast = at::autocast;

namespace {

/// Sets the type of autocast. Clears torch's cache of casts if the type changes, since the cache does not record types.
void set_dtype(at::DeviceType device, at::ScalarType dtype) {
  if (dtype != autocast::get_autocast_dtype(device)) autocast::clear_cache();
  autocast::set_autocast_dtype(device, dtype);
}

}  // namespace

Autocast::Autocast(at::DeviceType device, const AutocastOptions& options)
    : device_(device),
      was_enabled_(autocast::is_autocast_enabled(device)),
      was_dtype_(autocast::get_autocast_dtype(device)) {
  if (options.dtype != at::kBFloat16 && options.dtype != at::kHalf)
    throw Error(ExitCode::usage, "starting autocast",
                detail::str(c10::toString(options.dtype), " is not a type for it"), "Use at::kBFloat16 or at::kHalf");
  warn_if_slow(device_, options);
  autocast::set_autocast_enabled(device_, options.enabled);
  set_dtype(device_, options.dtype);
  autocast::increment_nesting();
}

Autocast::~Autocast() {
  // Several operations may use the cast of a parameter, so casts stay cached until the outermost scope ends. They are
  // cleared then, since the optimizer is about to change the parameters.
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_enabled(device_, was_enabled_);
  set_dtype(device_, was_dtype_);
}

GradScaler::GradScaler(Communicator communicator, at::Device device, const GradScalerOptions& options)
    : communicator_(std::move(communicator)), options_(options) {
  if (!options_.enabled) return;
  check(options_);
  scale_ = at::full({}, options_.init_scale, at::TensorOptions(device).dtype(at::kFloat));
  growth_tracker_ = at::zeros({}, at::TensorOptions(device).dtype(at::kInt));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return is_enabled() ? loss.mul(scale_.to(loss.device())) : loss;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) const {
  std::vector<at::Tensor> scaled;
  for (const auto& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

bool GradScaler::unscale_here(const torch::optim::Optimizer& optimizer) const {
  const at::NoGradGuard no_grad;
  std::map<Kind, std::vector<at::Tensor>> gradients;
  std::set<const void*> seen;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      // A weight that the optimizer lists twice has one gradient, which must be unscaled once.
      if (!gradient.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (gradient.scalar_type() == at::kHalf)
        refuse(unscaling, "one of them is in half precision",
               "Keep the parameters in float: the autocast scope casts them where they are used");
      if (gradient.is_complex())
        refuse(unscaling, "one of them is complex", "Step complex parameters by an optimizer without the scaler");
      const auto values = gradient.is_sparse() ? gradient._values() : gradient;
      gradients[{values.device().type(), values.device().index(), values.scalar_type()}].push_back(values);
    }
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  bool found = false;
  for (auto& [kind, some] : gradients) {
    const auto device = some.front().device();
    auto found_inf = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(some, found_inf, inverse.to(device));
    found = found || found_inf.item<float>() != 0;
  }
  return found;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (is_enabled()) unscale(optimizer, /*fetch=*/true);
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer, bool fetch) {
  auto& status = statuses_[&optimizer];
  if (status.stepped)
    refuse(unscaling, "step() was called for this optimizer since the last update()", "Call unscale_() before step()");
  if (status.unscaled)
    refuse(unscaling, "unscale_() was called for this optimizer since the last update()",
           "Call it once, after the last backward()");
  for (const auto& group : optimizer.param_groups())
    fetch ? detail::gradients::fetch_averages(group.params()) : detail::gradients::before_own_change(group.params());
  status.found_inf = communicator_.all_reduce(std::int64_t{unscale_here(optimizer)}, ReduceOp::max) != 0;
  status.unscaled = true;
  for (const auto& group : optimizer.param_groups())
    status.is_step_complete =
        status.is_step_complete && std::ranges::all_of(group.params(), detail::gradients::is_step_complete);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return optimizer.step(), true;
  auto& status = statuses_[&optimizer];
  if (status.stepped)
    refuse("stepping an optimizer", "step() was called for it since the last update()",
           "Call the scaler's update() after each step");
  // A fused optimizer averages in its own step, so its gradients are unscaled before they are averaged; the result is
  // the same.
  const auto* const prepared = dynamic_cast<const detail::optim::Prepared*>(&optimizer);
  if (!status.unscaled) unscale(optimizer, /*fetch=*/!prepared || !prepared->fused());
  const auto skipped_before = prepared ? prepared->skipped_steps() : 0;
  if (!status.found_inf) optimizer.step();
  status.stepped = true;
  return !status.found_inf && (!prepared || prepared->skipped_steps() == skipped_before);
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) return;
  if (new_scale && !is_scale(*new_scale))
    refuse("updating a gradient scaler", "the new scale is not a finite number above 0",
           "Leave it out, and the scaler chooses the scale");
  const auto any = [&](bool StepStatus::*what) {
    return std::ranges::any_of(statuses_, [&](const auto& of) { return of.second.*what; });
  };
  if (std::ranges::any_of(statuses_, [](const auto& of) { return !of.second.is_step_complete; })) {
    // Keep the scale: gradients with this scale are stored, to be summed with those of the step's other batches.
  } else if (new_scale) {
    scale_.fill_(*new_scale);
  } else {
    if (!any(&StepStatus::unscaled))
      refuse("updating a gradient scaler", "there was no step() since the last update()", "Call step() first");
    const auto found_inf = at::full({}, any(&StepStatus::found_inf) ? 1.0 : 0.0, scale_.options());
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
                           options_.growth_interval);
  }
  statuses_.clear();
}

double GradScaler::get_scale() const { return is_enabled() ? scale_.item<float>() : 1.0; }

GradScaler::operator StateEntry() {
  const auto save = [this] {
    // As in torch, a scaler that is not enabled has no state.
    if (!is_enabled()) return StateDict{};
    return StateDict{.values = {{"scale", get_scale()},
                                {"growth_factor", options_.growth_factor},
                                {"backoff_factor", options_.backoff_factor},
                                {"growth_interval", options_.growth_interval},
                                {"_growth_tracker", growth_tracker_.item<int>()}}};
  };
  const auto load = [this](const StateDict& saved) {
    if (!is_enabled()) return;
    constexpr const char* loading = "loading a gradient scaler";
    if (saved.values.empty())
      throw Error(ExitCode::data, loading, "the one in the checkpoint was not enabled", "Disable the one here");
    try {
      auto options = options_;
      options.growth_factor = saved.values.at("growth_factor");
      options.backoff_factor = saved.values.at("backoff_factor");
      options.growth_interval = saved.values.at("growth_interval");
      options.init_scale = saved.values.at("scale");
      const int growth_tracker = saved.values.at("_growth_tracker");
      check(options);
      options_ = options;
      scale_.fill_(options.init_scale);
      growth_tracker_.fill_(growth_tracker);
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, loading, detail::str("the checkpoint holds something else: ", error.what()),
                  "Restore it from a copy");
    }
    statuses_.clear();
  };
  return StateEntry(save, load);
}

}  // namespace muster
