// The loss of a batch, as the default train_batch() and validate_batch() take it.
#pragma once

#include "train/operator_parts.hpp"

namespace torch::nn {
class Module;
}

namespace muster::detail::train {

/// Whether this criterion compares output and target element by element, so that both have the same shape. Null: no.
bool is_elementwise(const torch::nn::Module* criterion);

/// The loss that the registered criterion gives; an Error (ExitCode::user_error) where it broadcasts output and target
/// against each other.
at::Tensor loss_of(const char* doing, const OperatorParts& parts, const at::Tensor& output, const at::Tensor& target);

}  // namespace muster::detail::train
