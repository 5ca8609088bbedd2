// Modules: parameters and buffers by name.
#include "optim/weight_averages.hpp"
#include "state/copy.hpp"
#include "state/stateful.hpp"

#include <ATen/ops/equal.h>
#include <torch/nn/module.h>

namespace muster {
namespace {

using namespace detail::state;

class StatefulModule : public Stateful {
 public:
  explicit StatefulModule(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  StateDict save(const ParameterPaths&) const override { return {.tensors = tensors()}; }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    const auto here = tensors(), trained = parameters();
    // The state of an EMA has averages, in float for 16-bit parameters. They are rounded when they are copied.
    const bool of_averages = saved.values.is_object() && saved.values.contains("updates");
    std::map<const c10::TensorImpl*, const std::string*> first_name;
    for (const auto& [path, tensor] : here) {
      const auto at = saved.tensors.find(path);
      if (at == saved.tensors.end()) {
        differences.push_back({path, "not in the checkpoint"});
        continue;
      }
      const auto type =
          of_averages && trained.contains(path) ? detail::optim::type_of_average(tensor) : tensor.scalar_type();
      compare_values(path, at->second, tensor, type, differences);
      const auto [first, inserted] = first_name.try_emplace(tensor.unsafeGetTensorImpl(), &path);
      if (inserted) continue;
      const auto other = saved.tensors.find(*first->second);
      if (other != saved.tensors.end() && !same_values(other->second, at->second))
        differences.push_back({path, "the same tensor as " + *first->second + " here, another in the checkpoint"});
    }
    for (const auto& [path, tensor] : saved.tensors)
      if (!here.contains(path)) differences.push_back({path, "in the checkpoint, not here"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override {
    for (auto& [path, tensor] : tensors()) copy_values(tensor, saved.tensors.at(path));
  }

  Replication replication() const override { return Replication::averaged; }

  std::map<std::string, at::Tensor> parameters() const override {
    std::map<std::string, at::Tensor> named;
    for (const auto& item : module_->named_parameters())
      if (item.value().defined()) named.emplace(item.key(), item.value());
    return named;
  }

  std::map<std::string, at::Tensor> buffers() const override {
    std::map<std::string, at::Tensor> named;
    for (const auto& item : module_->named_buffers())
      if (item.value().defined()) named.emplace(item.key(), item.value());
    return named;
  }

 private:
  static bool same_values(const at::Tensor& a, const at::Tensor& b) {
    return a.is_same(b) || (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(a, b));
  }

  std::map<std::string, at::Tensor> tensors() const {
    auto named = parameters();
    named.merge(buffers());
    return named;
  }

  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace

StateEntry::StateEntry(std::shared_ptr<torch::nn::Module> module)
    : object_(std::make_shared<StatefulModule>(std::move(module))) {}

}  // namespace muster
