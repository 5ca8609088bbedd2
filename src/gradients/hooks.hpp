// The hooks by which autograd calls the reducer, before and after a gradient is added to a parameter's .grad.
//
// The hooks belong to the tensor, so they stay when the module is moved. They hold the reducer weakly, so a module may
// outlive its session and is then an ordinary module again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class Reducer;

/// The post-accumulate-gradient hook that a parameter already has.
enum class ExistingHook {
  no,
  prepared,  ///< the hook of a living reducer
  foreign,   ///< another hook, which ours would replace
};
ExistingHook hook_state(const at::Tensor& parameter);

/// Returns the hook that is called when a gradient has been added to the parameter's .grad; null if there is none.
const void* hook_of(const at::Tensor& parameter);

/// True if no step of the parameter's model is half done (Reducer::is_step_complete), or it is not prepared.
bool is_step_complete(const at::Tensor& parameter);

/// Makes the parameters' .grad hold the averages (Reducer::fetch_averages). For all readers of gradients except the
/// fused optimizer that they were left to. Collective if an optimizer is fused with one of the parameters' models.
void fetch_averages(const std::vector<at::Tensor>& parameters);
/// Call it before muster itself changes those gradients (Reducer::before_own_change).
void before_own_change(const std::vector<at::Tensor>& parameters);
/// Call it when an optimizer with the parameters is prepared (Reducer::note_optimizer).
void note_optimizer(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer);
/// Call it after a prepared optimizer's step with the parameters (Reducer::note_step).
void note_step(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer);

/// The hooks pass `index` to the reducer.
void install_hooks(const at::Tensor& parameter, const std::weak_ptr<Reducer>& reducer, std::size_t index);

/// Inside a hook: true if this backward() adds to the parameter's .grad. autograd::grad() runs the first hook too, but
/// only returns the gradient.
bool accumulates(const at::Tensor& parameter);

/// Inside the second hook: true if another tensor uses the memory of a .grad that this backward() has made. autograd
/// puts a gradient into .grad without a copy if nobody else has the tensor. But another branch of the graph, the caller
/// of backward() or a hook may have another tensor with the same memory.
bool others_have_memory_of(const at::Tensor& gradient);

/// Inside a hook: calls `then` at the end of this backward(), after all functions that were queued before. If
/// backward() throws, `then` is destroyed without a call.
void at_end_of_backward(std::function<void()> then);

}  // namespace muster::detail::gradients
