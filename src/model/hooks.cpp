#include "model/hooks.hpp"

#include "model/reducer.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace muster::model {
namespace {

namespace autograd = torch::autograd;

class AfterAccumulation : public autograd::PostAccumulateGradHook {
 public:
  AfterAccumulation(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}

  void operator()(const autograd::Variable&) override {
    if (const auto reducer = reducer_.lock()) reducer->accumulated(index_);
  }
  bool alive() const noexcept { return !reducer_.expired(); }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

}  // namespace

Hooked hooked(const at::Tensor& parameter) {
  if (!autograd::impl::get_autograd_meta(parameter)) return Hooked::no;  // never one that is trained
  const auto& hook = autograd::impl::post_acc_grad_hooks(parameter);
  if (!hook) return Hooked::no;
  const auto* ours = dynamic_cast<const AfterAccumulation*>(hook.get());
  if (!ours) return Hooked::foreign;
  return ours->alive() ? Hooked::prepared : Hooked::no;
}

void install_hooks(const at::Tensor& parameter, const std::weak_ptr<Reducer>& reducer, std::size_t index) {
  // By the public way, so that it lives beside hooks of the user's own; it wants a tensor that is to be trained.
  const bool trained = parameter.requires_grad();
  parameter.set_requires_grad(true);
  parameter.register_hook([reducer, index](const at::Tensor& gradient) {
    const auto alive = reducer.lock();
    return alive && gradient.defined() ? alive->weigh(index, gradient) : gradient;
  });
  parameter.set_requires_grad(trained);
  autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<AfterAccumulation>(reducer, index));
}

bool accumulates(const at::Tensor& parameter) {
  const auto* needed = autograd::get_current_graph_task_exec_info();
  if (!needed || needed->empty()) return true;  // backward() to every leaf
  const auto node = needed->find(autograd::impl::grad_accumulator(parameter).get());
  return node != needed->end() && node->second.needed_;
}

void at_end_of_backward(std::function<void()> then) {
  autograd::Engine::get_default_engine().queue_callback(std::move(then));
}

}  // namespace muster::model
