#include "session/accumulated_gradients.hpp"

#include "gradients/tensor_changes.hpp"
#include "state/stateful.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>

namespace muster::detail::session {
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

bool AccumulatedGradients::any_unprepared(const std::vector<std::vector<at::Tensor>>& models) {
  const at::NoGradGuard no_grad;
  bool any = false;
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
    now.used = none || stepped || (was.used && now.gradients == was.gradients);
    any = any || !now.used;
    before->second = now;
  }
  return any;
}

bool AccumulatedGradients::none(const StateEntries* entries) {
  std::set<const void*> known;
  for (const auto& prepared : prepared_.all())
    if (prepared->reducer())
      for (const auto& tensor : prepared->module()->parameters()) known.insert(tensor.unsafeGetTensorImpl());
  std::vector<std::vector<at::Tensor>> others;
  if (entries != nullptr)
    for (const auto& [name, entry] : *entries) {
      others.emplace_back();
      for (const auto& [path, tensor] : entry.object()->parameters())
        if (!known.contains(tensor.unsafeGetTensorImpl())) others.back().push_back(tensor);
    }
  // Not short-circuited: both must see this boundary.
  const bool none_prepared = prepared_.have_no_gradient_to_save(), none_else = !any_unprepared(others);
  const bool none = *prepared_.no_sync_depth() == 0 && none_prepared && none_else;
  boundaries_with_gradients_ = none ? 0 : boundaries_with_gradients_ + 1;
  return none;
}

bool AccumulatedGradients::have_been_used_since(const StateEntries* entries) {
  if (entries == nullptr) return false;
  const at::NoGradGuard no_grad;
  std::map<const void*, std::size_t> now;
  for (const auto& [name, entry] : *entries)
    for (const auto& [path, parameter] : entry.object()->parameters())
      if (parameter.grad().defined() || first_.contains(parameter.unsafeGetTensorImpl()))
        now.emplace(parameter.unsafeGetTensorImpl(), hash_of(parameter));
  if (first_.empty()) {
    first_ = std::move(now);
    return false;
  }
  return std::ranges::any_of(first_, [&](const auto& one) {
    const auto found = now.find(one.first);
    return found != now.end() && found->second != one.second;
  });
}

}  // namespace muster::detail::session
