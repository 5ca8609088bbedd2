// The names, shapes and types of a module's tensors, and their comparison between ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

/// Returns one line per parameter and buffer, in the module's order: kind and name, a tab, type and shape; also the
/// strides of a tensor that is not contiguous, and whether a parameter is frozen. If a parameter has two names, the
/// line of the second name says so.
std::string signature(const torch::nn::Module& module);

/// Describes the first difference between the ranks' signatures, for example `parameter fc.weight is Float[2, 3] on
/// ranks 0, 2 and missing on rank 1`; nothing if they are equal. `signatures` has one element per rank. The result is
/// the same on every rank.
std::optional<std::string> first_difference(const std::vector<std::string>& signatures);

}  // namespace muster::detail::gradients
