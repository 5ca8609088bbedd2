// The hooks by which autograd calls the reducer: the first hook before a gradient is added to a parameter's .grad, the
// second hook (post-accumulate) afterwards.
//
// A hook belongs to the tensor, so it stays when the module is moved. It has only a weak pointer to the reducer: a
// module may outlive its session and is then an ordinary module again, until the next reducer takes its hooks over.
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

/// True if the last step of the parameter's model is complete (Reducer::is_step_complete), or if the parameter is not
/// prepared.
bool is_step_complete(const at::Tensor& parameter);

/// Replaces this rank's own gradients in the parameters' .grad by the averages (Reducer::fetch_averages). The fused
/// optimizer that backward() leaves gradients to does not need it; all other readers of .grad do. Collective if an
/// optimizer is fused with one of the parameters' models, or if its last round was in no_sync().
void fetch_averages(const std::vector<at::Tensor>& parameters);
/// Call it before muster itself changes the .grad of these parameters (Reducer::before_own_change).
void before_own_change(const std::vector<at::Tensor>& parameters);
/// Call it when an optimizer that holds the parameters is prepared (UnsteppedGradients::note_optimizer).
void note_optimizer(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer);
/// Call it when a prepared optimizer has stepped the parameters (UnsteppedGradients::note_step).
void note_step(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer);

/// Installs both hooks, or takes over those of a reducer that is gone. They pass `index` to the reducer.
void install_hooks(const at::Tensor& parameter, const std::weak_ptr<Reducer>& reducer, std::size_t index);

/// For use inside a hook: true if this backward() adds to the parameter's .grad. autograd::grad() runs the first hook,
/// too, but returns the gradient and leaves .grad alone.
bool accumulates(const at::Tensor& parameter);

/// For use inside the second hook, on a .grad that this backward() has made: true if another tensor shares its memory.
/// autograd moves a gradient into .grad without a copy if no other reference to the tensor exists. But another branch
/// of the graph, the caller of backward() or a hook may hold another tensor on the same memory.
bool others_have_memory_of(const at::Tensor& gradient);

/// For use inside a hook: calls `then` at the end of this backward(), after all functions that were queued earlier. If
/// backward() throws, `then` is destroyed without having been called.
void at_end_of_backward(std::function<void()> then);

}  // namespace muster::detail::gradients
