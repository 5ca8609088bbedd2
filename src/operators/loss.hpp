// The loss of a batch in the default train_batch() and validate_batch().
#pragma once

#include "operators/registry.hpp"

namespace torch::nn {
class Module;
}

namespace muster::detail::operators {

/// True if this is one of torch's criteria that compare output and target element by element, so that both must have
/// the same shape. False if it is null.
bool is_elementwise(const torch::nn::Module* criterion);

/// Returns the loss by the registered criterion. Throws an Error (ExitCode::user_error) if output and target differ in
/// shape although the criterion is elementwise, or if the criterion broadcasts them to a larger shape.
at::Tensor compute_loss(const char* doing, const OperatorRegistry& registry, const at::Tensor& output,
                        const at::Tensor& target);

}  // namespace muster::detail::operators
