// Where autograd calls the reducer: before and after a gradient is added to a parameter's .grad.
//
// The hooks live in the tensor, so they stay when the module is moved; they hold the reducer weakly, so a module may
// outlive its session and is then an ordinary module again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

class Reducer;

/// What autograd finds already hooked to a parameter.
enum class Hooked {
  no,
  prepared,  ///< hooks of a reducer that lives
  foreign,   ///< somebody else's, which ours would replace
};
Hooked hooked(const at::Tensor& parameter);

/// What is called when a gradient has been added to the parameter's .grad; null: nothing.
const void* hook_of(const at::Tensor& parameter);

/// Whether the parameter is prepared, and a step of its model half done (Reducer::amid_step).
bool amid_step(const at::Tensor& parameter);

/// For whoever reads the parameters' gradients and is not the fused optimizer that they were left to: they become the
/// averages (Reducer::fetch_averages). Collective where an optimizer is fused with one of their models.
void fetch_averages(const std::vector<at::Tensor>& parameters);
/// Before muster changes those gradients itself (Reducer::allow_change).
void allow_change(const std::vector<at::Tensor>& parameters);
/// After a prepared optimizer's step with them (Reducer::note_step).
void note_step(const std::vector<at::Tensor>& parameters, const std::weak_ptr<const void>& optimizer);

/// `index` is what the reducer is told.
void install_hooks(const at::Tensor& parameter, const std::weak_ptr<Reducer>& reducer, std::size_t index);

/// Inside a hook: whether this pass adds to the parameter's .grad. autograd::grad() runs the first hook as well, but
/// only hands the gradient out.
bool accumulates(const at::Tensor& parameter);

/// Inside the second hook: whether somebody else reads or writes the memory of a .grad that this pass has made.
/// autograd hands a gradient over as it is if nobody has the tensor; but another branch of the graph, who called
/// backward() with it, or a hook may have another tensor of the same memory.
bool others_have_memory_of(const at::Tensor& gradient);

/// Inside a hook: calls `then` at the end of this backward(), after all that were queued before; it is destroyed
/// uncalled if backward() throws.
void at_end_of_backward(std::function<void()> then);

}  // namespace muster::detail::gradients
