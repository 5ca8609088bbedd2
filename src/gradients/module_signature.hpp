// The names, shapes and types of a module's tensors, and whether all ranks have the same.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

/// One line per parameter and buffer, in their order: kind and name, a tab, type and shape. A parameter that stands
/// under a second name says so.
std::string signature(const torch::nn::Module& module);

/// Where the signatures, one of each rank, differ first: `parameter fc.weight is Float[2, 3] on ranks 0, 2 and missing
/// on rank 1`. The same on whichever rank it is asked.
std::optional<std::string> first_difference(const std::vector<std::string>& signatures);

}  // namespace muster::detail::gradients
