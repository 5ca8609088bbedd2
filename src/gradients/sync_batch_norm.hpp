// Batch-norm over the ranks: the sums that the ranks exchange, and the search for batch-norms in a module.
#pragma once

#include "step/steps.hpp"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class ProcessGroup;
}
namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

struct ParallelContext;

/// The ranks of a prepared model, with a process group for its batch-norms only. The ranks call sum() in the order of
/// the forward pass, and in backward() in reverse order: among the nodes that are ready, autograd runs the one made
/// last first (on one thread), and a node waits only for nodes made after it. So ranks can be in different layers only
/// if they run different programs, and that is an Error.
class BatchNormRanks {
 public:
  BatchNormRanks(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const step::Steps> steps);
  ~BatchNormRanks();

  /// Weight of the current batch; 0 if it does not count. See step/batch_weight.hpp.
  double weight() const { return steps_->weight(); }
  /// Returns the sums of `values` (doubles, flat) over the ranks. All ranks must be in that layer. Collective.
  at::Tensor sum(const at::Tensor& values, int layer);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const step::Steps> steps_;
};

/// Replaces the batch-norms that are in a Sequential of the module by SyncBatchNorms, and has those of
/// BatchNormOperators synchronised. If the module has another batch-norm, throws an Error (ExitCode::usage) that names
/// it and changes nothing.
void replace_batch_norms(torch::nn::Module& module);

/// Connects the module's SyncBatchNorms over the ranks; returns null if it has none. Throws an Error if the run has
/// virtual workers too. Collective if the module has any, which must be the same on all ranks.
std::shared_ptr<BatchNormRanks> connect_batch_norms(torch::nn::Module& module, const ParallelContext& context);

}  // namespace muster::detail::gradients
