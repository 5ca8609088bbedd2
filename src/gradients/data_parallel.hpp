// One prepared model: weights made equal once, gradients averaged in every backward().
#pragma once

#include "muster/communicator.hpp"
#include "muster/model.hpp"
#include "step/steps.hpp"

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>

namespace c10d {
class ProcessGroup;
}
namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

class Reducer;
class SharedStatistics;

/// What the models that are prepared for the same ranks have in common.
struct ParallelContext {
  Communicator communicator;
  /// A process group over the ranks of `communicator`, a new one at each call: each model has its own, so that two
  /// models in one backward() cannot take each other's messages. Collective.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> new_group;
  std::shared_ptr<const step::Steps> steps;  ///< say which batch counts
  std::shared_ptr<const int> no_sync_depth;  ///< 0: gradients are averaged
  /// Whether this rank has been asked to stop, looked at in every averaging pass (Reducer::any_stop_requested), on the
  /// thread that runs backward(). None: it never is.
  std::function<bool()> stop_requested = {};
  c10::Device device = c10::kCPU;
  /// Gradients go through node-shared memory where that is possible, not through the process group.
  bool share_memory = true;
  /// This rank has a core that its threads of torch leave alone.
  bool spare_core = false;
  /// This rank's part of each step; one micro-batch unless there are virtual workers.
  step::Share share = {};
};

/// Lives as long as the session; the hooks in the model's tensors hold it weakly, so the model may live longer.
class DataParallel {
 public:
  /// Moves the module, compares names, shapes and types over the ranks, copies rank 0's weights and buffers to all, in
  /// place, and installs the hooks. A mismatch is an Error (ExitCode::data) that names the tensor and the ranks, the
  /// same on all. A module that is prepared already, or shares a parameter with one that is, is refused. With
  /// Parallel::none the module is moved and nothing else. Collective.
  static std::shared_ptr<DataParallel> prepare(std::shared_ptr<torch::nn::Module> module,
                                               const ParallelContext& context, const ModelOptions& options);
  ~DataParallel();

  /// With virtual workers: the buffers become those of that micro-batch (of this rank's, from 0).
  void enter(int micro_batch);
  /// Batch-norm's running statistics become the mean over the ranks, its num_batches_tracked rank 0's; other buffers
  /// stay this rank's own. With virtual workers the mean is over the micro-batches, and every other buffer becomes the
  /// first micro-batch's. Collective.
  void synchronise_buffers();
  /// Parameters and buffers become those of that rank. Collective.
  void copy_from(int rank);
  /// For the ranks to agree on what they have left to do, made at the first call. Collective.
  const Communicator& channel();
  const torch::nn::Module* module() const noexcept { return module_.get(); }
  /// Null with Parallel::none.
  const std::shared_ptr<Reducer>& reducer() const noexcept { return reducer_; }
  /// Whether it has a SyncBatchNorm, for which all ranks run the same forward passes.
  bool synchronises_forward() const noexcept { return statistics_ != nullptr; }

 private:
  class MicroBatchBuffers;

  DataParallel(std::shared_ptr<torch::nn::Module> module, Communicator communicator);
  void average(const ParallelContext& context, const ModelOptions& options);

  std::shared_ptr<torch::nn::Module> module_;
  Communicator communicator_;
  std::optional<Communicator> channel_;
  // None of them with Parallel::none.
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<SharedStatistics> statistics_;      ///< of its SyncBatchNorms, if it has any
  std::unique_ptr<MicroBatchBuffers> micro_batches_;  ///< with virtual workers
};

}  // namespace muster::detail::gradients
