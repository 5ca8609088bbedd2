// Batch-norm over the ranks: connects a module's batch-norms, and sums their statistics over the ranks.
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

/// Sums the statistics of a prepared model's batch-norms over the ranks, in a process group of their own. All ranks
/// call sum() in the same order: in the order of the forward pass, and in backward() in reverse order, since autograd
/// (on one thread) runs the nodes in the reverse of the order in which they were made, as far as their dependencies
/// allow, and a node depends only on nodes made after it. Ranks are in different layers only if they run different
/// programs; then sum() throws an Error if it finds that.
class BatchNormRanks {
 public:
  BatchNormRanks(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const step::Steps> steps);
  ~BatchNormRanks();

  /// Weight of the current batch; 0 if it does not count. See step/batch_weight.hpp.
  double weight() const { return steps_->weight(); }
  /// Returns the sums of `values` (doubles, one dimension) over the ranks. `layer`: which layer calls. On the CPU,
  /// throws an Error if it differs between ranks; on a GPU, this is not checked. Collective.
  at::Tensor sum(const at::Tensor& values, int layer);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const step::Steps> steps_;
};

/// Replaces the module's batch-norms by SyncBatchNorms, if they are in a Sequential, and makes those of
/// BatchNormOperators synchronise. If the module has any other batch-norm, throws an Error (ExitCode::usage) that names
/// it, and changes nothing.
void replace_batch_norms(torch::nn::Module& module);

/// Connects the module's SyncBatchNorms over the ranks; returns null if it has none. Throws an Error if the run also
/// has virtual workers. Collective if the module has a SyncBatchNorm; it must have one on all ranks or on none.
std::shared_ptr<BatchNormRanks> connect_batch_norms(torch::nn::Module& module, const ParallelContext& context);

}  // namespace muster::detail::gradients
