// What the ranks tell each other for batch-norm, and where in a module it is.
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

/// The ranks of a prepared model, over a process group for its batch-norms alone. Their order is that of the forward
/// passes, and in backward() the reverse: on one thread autograd takes what was made last, among all that is ready, and
/// what a node waits for was made after it. So no two ranks meet in different layers, but by different programs, which
/// is an Error.
class SharedStatistics {
 public:
  SharedStatistics(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const step::Steps> steps);
  ~SharedStatistics();

  /// How much the batch that counts weighs, 0 for one that does not; see step/batch_weight.hpp.
  double weight() const { return steps_->weight(); }
  /// The sums of `values` (doubles, flat) over the ranks, which are all in that layer. Collective.
  at::Tensor sum(const at::Tensor& values, int layer);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const step::Steps> steps_;
};

/// Puts SyncBatchNorms in the place of the batch-norms that stand in a Sequential of the module. Any other is an Error
/// (ExitCode::usage) that names it; nothing is changed then.
void exchange_batch_norms(torch::nn::Module& module);

/// Joins the module's SyncBatchNorms over the ranks; null if it has none. Refuses what cannot be with them. Collective
/// where there is any, which is so on all ranks or on none.
std::shared_ptr<SharedStatistics> synchronise_batch_norms(torch::nn::Module& module, const ParallelContext& context);

}  // namespace muster::detail::gradients
