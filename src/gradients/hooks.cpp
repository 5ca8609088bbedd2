#include "gradients/hooks.hpp"

#include "gradients/reducer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace muster::detail::gradients {
namespace {

namespace autograd = torch::autograd;

/// What both hooks of a parameter call.
struct Target {
  std::weak_ptr<Reducer> reducer;
  std::size_t index;  ///< the parameter's, in the reducer
};

class AfterAccumulation : public autograd::PostAccumulateGradHook {
 public:
  explicit AfterAccumulation(std::shared_ptr<Target> target) : target_(std::move(target)) {}

  void operator()(const autograd::Variable&) override {
    if (const auto reducer = target_->reducer.lock()) reducer->after_accumulation(target_->index);
  }
  Target& target() const noexcept { return *target_; }

 private:
  std::shared_ptr<Target> target_;
};

class CountTensors : public autograd::PostAccumulateGradHook {
 public:
  explicit CountTensors(std::size_t& count) : count_(&count) {}
  void operator()(const autograd::Variable& leaf) override { *count_ = leaf.grad().storage().use_count(); }

 private:
  std::size_t* count_;
};

const autograd::PostAccumulateGradHook* post_hook_of(const at::Tensor& parameter) {
  if (!autograd::impl::get_autograd_meta(parameter)) return nullptr;  // it has never required a gradient
  return autograd::impl::post_acc_grad_hooks(parameter).get();
}

const AfterAccumulation* our_hook_of(const at::Tensor& parameter) {
  return dynamic_cast<const AfterAccumulation*>(post_hook_of(parameter));
}

/// Returns null if the parameter is not prepared.
std::shared_ptr<Reducer> reducer_of(const at::Tensor& parameter) {
  const auto* const ours = our_hook_of(parameter);
  return ours ? ours->target().reducer.lock() : nullptr;
}

/// Returns the reducers of the parameters, each once, in the same order on all ranks.
std::vector<std::shared_ptr<Reducer>> reducers_of(const std::vector<at::Tensor>& parameters) {
  std::vector<std::shared_ptr<Reducer>> reducers;
  for (const auto& parameter : parameters)
    if (auto reducer = reducer_of(parameter); reducer && std::ranges::find(reducers, reducer) == reducers.end())
      reducers.push_back(std::move(reducer));
  std::ranges::sort(reducers, {}, &Reducer::order);
  return reducers;
}

/// Returns how many tensors autograd itself keeps on a gradient's memory while it calls the post-accumulate hook. The
/// number depends on the release of torch, so it is measured.
std::size_t tensors_of_autograd() {
  static const std::size_t tensors = [] {
    std::size_t count = 0;
    const auto leaf = at::zeros({1}).requires_grad_();
    autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<CountTensors>(count));
    const at::NoGradGuard no_grad;
    autograd::variable_list gradient(1);
    gradient[0] = at::zeros({1});
    (*autograd::impl::grad_accumulator(leaf))(std::move(gradient));
    return count;
  }();
  return tensors;
}

}  // namespace

ExistingHook hook_state(const at::Tensor& parameter) {
  const auto* const hook = post_hook_of(parameter);
  if (!hook) return ExistingHook::no;
  const auto* const ours = dynamic_cast<const AfterAccumulation*>(hook);
  if (!ours) return ExistingHook::foreign;
  return ours->target().reducer.expired() ? ExistingHook::no : ExistingHook::prepared;
}

const void* hook_of(const at::Tensor& parameter) { return post_hook_of(parameter); }

void fetch_averages(const std::vector<at::Tensor>& parameters) {
  for (const auto& reducer : reducers_of(parameters)) reducer->fetch_averages();
}

void before_own_change(const std::vector<at::Tensor>& parameters) {
  for (const auto& reducer : reducers_of(parameters)) reducer->before_own_change();
}

void note_optimizer(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer) {
  for (const auto& parameter : parameters)
    if (const auto reducer = reducer_of(parameter))
      reducer->unstepped().note_optimizer(our_hook_of(parameter)->target().index, optimizer);
}

void note_step(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer) {
  for (const auto& parameter : parameters)
    if (const auto reducer = reducer_of(parameter))
      reducer->unstepped().note_step(our_hook_of(parameter)->target().index, optimizer);
}

bool is_step_complete(const at::Tensor& parameter) {
  const auto reducer = reducer_of(parameter);
  return !reducer || reducer->is_step_complete();
}

void install_hooks(const at::Tensor& parameter, const std::weak_ptr<Reducer>& reducer, std::size_t index) {
  if (const auto* const ours = our_hook_of(parameter)) {
    ours->target() = {reducer, index};
    return;
  }
  const auto target = std::make_shared<Target>(Target{reducer, index});
  // register_hook() keeps the user's own hooks, but works only on a tensor that requires a gradient.
  const bool trained = parameter.requires_grad();
  parameter.set_requires_grad(true);
  parameter.register_hook([target](const at::Tensor& gradient) {
    const auto reducer = target->reducer.lock();
    return reducer && gradient.defined() ? reducer->before_accumulation(target->index, gradient) : gradient;
  });
  parameter.set_requires_grad(trained);
  autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<AfterAccumulation>(target));
}

bool accumulates(const at::Tensor& parameter) {
  const auto* needed = autograd::get_current_graph_task_exec_info();
  if (!needed || needed->empty()) return true;  // backward() computes the gradient of every leaf
  const auto node = needed->find(autograd::impl::grad_accumulator(parameter).get());
  return node != needed->end() && node->second.needed_;
}

bool others_have_memory_of(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.storage().use_count() > tensors_of_autograd();
}

void at_end_of_backward(std::function<void()> then) {
  autograd::Engine::get_default_engine().queue_callback(std::move(then));
}

}  // namespace muster::detail::gradients
