// A sum over micro-batches in their order, whichever rank has which: ((s₀ + s₁) + s₂) + …, the same bits at any number
// of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace muster::detail::gradients {

/// `micro_batches`: one flat tensor for each of this rank's, which follow those of the ranks before it; of the same
/// type and length everywhere. The first rank adds up its own, every other goes on from what the one before it sends,
/// and the last tells all. The sum, on every rank. Collective.
at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches);

}  // namespace muster::detail::gradients
