#include "gradients/model_parameters.hpp"

#include "gradients/exchange.hpp"
#include "gradients/hooks.hpp"
#include "gradients/sparse_exchange.hpp"
#include "muster/error.hpp"

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <string_view>

namespace muster::detail::gradients {
namespace {

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

}  // namespace

void ModelParameter::check_gradient() const {
  const auto& gradient = tensor.grad();
  if (sparse && gradient.layout() != at::kSparse)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + name + " is dense, but its embedding sparse",
                "Use the parameter in that embedding alone, or make it with sparse(false)");
  if (!sparse && gradient.layout() != at::kStrided)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + name + " is sparse",
                "Make it dense, or leave it to a torch::nn::Embedding or EmbeddingBag with sparse(true)");
  if (gradient.scalar_type() != type)
    throw Error(ExitCode::data, averaging,
                c10::str("the gradient of parameter ", name, " is ", gradient.scalar_type(), ", not ", type),
                "Keep gradients in the type of their parameter");
  if (gradient.sizes() != at::IntArrayRef(sizes))
    throw Error(
        ExitCode::data, averaging,
        c10::str("the gradient of parameter ", name, " is ", gradient.sizes(), ", not ", at::IntArrayRef(sizes)),
        "Keep gradients in the shape of their parameter");
}

ModelParameters::ModelParameters(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
  const auto sparse = sparse_parameters(*module_);
  std::set<const void*> seen;  // parameters() lists a shared tensor under each of its names
  for (const auto& item : module_->named_parameters()) {
    const auto& tensor = item.value();
    names_.emplace_back(item.key(), tensor.unsafeGetTensorImpl());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) continue;
    all_.push_back({item.key(), tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.device(),
                    sparse.contains(tensor.unsafeGetTensorImpl())});
  }
}

void ModelParameters::install_hooks(const std::weak_ptr<Reducer>& reducer) {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    gradients::install_hooks(all_[i].tensor, reducer, i);
    all_[i].hook = hook_of(all_[i].tensor);
  }
}

void ModelParameters::check_parameters() const {
  const auto now = module_->named_parameters();
  for (const auto& [name, tensor] : names_) {
    const auto* found = now.find(name);
    if (!found) refuse("parameter " + name + " was removed from the model after prepare_model");
    if (found->unsafeGetTensorImpl() != tensor) refuse("parameter " + name + " was replaced after prepare_model");
  }
  if (now.size() != names_.size()) {
    std::set<std::string_view> known;
    for (const auto& [name, tensor] : names_) known.insert(name);
    for (const auto& item : now)
      if (!known.contains(item.key()))
        refuse("parameter " + item.key() + " was added to the model after prepare_model");
  }
  for (const auto& p : all_) {
    if (hook_of(p.tensor) != p.hook)
      throw Error(ExitCode::data, averaging,
                  "parameter " + p.name + " was given a post-accumulate-gradient hook after prepare_model",
                  "Leave that hook to muster");
  }
  check_shapes();
}

void ModelParameters::check_shapes() const {
  for (const auto& p : all_)
    if (p.tensor.sizes() != at::IntArrayRef(p.sizes) || p.tensor.scalar_type() != p.type ||
        p.tensor.device() != p.device)
      refuse(c10::str("parameter ", p.name, " was ", p.type, at::IntArrayRef(p.sizes), " on ", p.device,
                      " in prepare_model and is ", p.tensor.scalar_type(), p.tensor.sizes(), " on ", p.tensor.device(),
                      " now"));
}

std::string ModelParameters::name_of(const at::Tensor& parameter) const {
  const auto found = std::ranges::find(names_, parameter.unsafeGetTensorImpl(), [](const auto& n) { return n.second; });
  return found == names_.end() ? std::string() : found->first;
}

bool ModelParameters::averages(const at::Tensor& parameter) const {
  return std::ranges::any_of(all_, [&](const auto& p) { return p.tensor.is_same(parameter); });
}

}  // namespace muster::detail::gradients
