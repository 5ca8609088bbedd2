#include "train/stop.hpp"

#include "gradients/fingerprint.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <string_view>

namespace muster::detail::train {

void StopWish::hear(bool any) noexcept {
  known_ = known_ || any;
  places_ = 0;
  asked_ = {};
}

void StopWish::ask(const Communicator& communicator, bool mine) {
  if (known_ || ++places_ < interval_) return;
  constexpr double share = 0.01;
  const auto begin = Clock::now();
  double places = 1;
  if (asked_ != Clock::time_point{} && begin > asked_) {
    const auto place = std::chrono::duration<double>(begin - asked_).count() / static_cast<double>(places_);
    places = std::ceil(std::chrono::duration<double>(cost_).count() / (share * place));
  }
  // One slow answer must not keep the next from being heard for long.
  const auto most = static_cast<double>(2 * interval_);
  std::array<std::int64_t, 2> words{mine, static_cast<std::int64_t>(std::clamp(places, 1.0, most))};
  communicator.all_reduce(std::span(words), ReduceOp::max);
  asked_ = Clock::now();
  cost_ = asked_ - begin;
  known_ = words[0] != 0;
  interval_ = words[1];
  places_ = 0;
}

namespace {

std::size_t hash_of(const at::Tensor& tensor) {
  if (tensor.layout() == at::kSparse) {
    const auto once = tensor.coalesce();
    return hash_of(once.indices()) * 31 + hash_of(once.values());
  }
  const auto bytes = tensor.detach().cpu().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

}  // namespace

bool Unspent::look(const std::vector<std::vector<at::Tensor>>& models) {
  const at::NoGradGuard no_grad;
  bool unspent = false;
  for (const auto& model : models) {
    if (model.empty()) continue;
    Model now;
    bool none = true;
    for (const auto& parameter : model) {
      now.parameters = now.parameters * 31 + hash_of(parameter);
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      now.gradients = now.gradients * 31 + hash_of(gradient);
      none = none && !gradients::any_nonzero(gradient);
    }
    const auto [before, is_new] = models_.try_emplace(model.front().unsafeGetTensorImpl());
    const auto& was = before->second;
    const bool stepped = !is_new && now.parameters != was.parameters;
    now.spent = none || stepped || (was.spent && now.gradients == was.gradients);
    unspent = unspent || !now.spent;
    before->second = now;
  }
  return unspent;
}

}  // namespace muster::detail::train
