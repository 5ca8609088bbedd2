// One prepared model: all ranks start with equal weights, and every backward() averages the gradients.
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
class BatchNormRanks;

/// What all models of a session have in common.
struct ParallelContext {
  Communicator communicator;
  /// Makes a new process group over the ranks of `communicator`. Each model has its own, so that two models in one
  /// backward() cannot receive each other's messages. Collective.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> new_group;
  std::shared_ptr<const step::Steps> steps;  ///< has the current batch and its weight
  std::shared_ptr<const int> no_sync_depth;  ///< number of open no_sync() scopes; gradients are averaged if it is 0
  /// True if this rank has been asked to stop. Called in every averaging round, on the thread that runs backward(); see
  /// Reducer::any_stop_requested(). Empty if the rank is never asked.
  std::function<bool()> stop_requested = {};
  c10::Device device = c10::kCPU;
  /// True if gradients go through node-shared memory where possible, instead of the process group.
  bool share_memory = true;
  /// True if this rank has a core that torch's threads do not use.
  bool spare_core = false;
  /// This rank's micro-batches of each step: one, unless there are virtual workers.
  step::MicroBatchShare share = {};
};

/// The session or DataParallel owns this object. The hooks in the model's tensors only have a weak pointer to it, so
/// the model may outlive it.
class PreparedModel {
 public:
  /// Compares the options over the ranks, moves the module to the device, compares names, shapes and types over the
  /// ranks, copies rank 0's weights and buffers to all ranks, in place, and installs the hooks. With Parallel::none,
  /// only compares the options and moves the module. Throws an Error (ExitCode::data) if the ranks' modules differ (the
  /// same on all ranks; it names the tensor and the ranks), or if a parameter is prepared already or has another
  /// post-accumulate hook; (ExitCode::usage) if the options differ, or if something in the module cannot be prepared.
  /// Collective.
  static std::shared_ptr<PreparedModel> prepare(std::shared_ptr<torch::nn::Module> module,
                                                const ParallelContext& context, const ModelOptions& options);
  ~PreparedModel();

  /// With virtual workers: puts the buffers of this rank's micro-batch number `micro_batch`, from 0, into the module.
  void load_buffers_of(int micro_batch);
  /// Sets the running statistics of batch-norms to their mean over the ranks, and num_batches_tracked to rank 0's;
  /// other buffers stay as they are on each rank. With virtual workers, the mean is over the micro-batches, and every
  /// other buffer is set to the first micro-batch's. Collective.
  void synchronise_buffers();
  /// Copies parameters and buffers from `rank` to all ranks. Collective.
  void broadcast_from(int rank);
  /// Returns a communicator for small collectives about this model, such as those of join(). The first call makes it.
  /// Collective.
  const Communicator& channel();
  const torch::nn::Module* module() const noexcept { return module_.get(); }
  /// Null with Parallel::none.
  const std::shared_ptr<Reducer>& reducer() const noexcept { return reducer_; }
  /// True if the model has a SyncBatchNorm; all ranks must then run the same forward passes.
  bool has_sync_batch_norm() const noexcept { return statistics_ != nullptr; }

 private:
  class MicroBatchBuffers;

  PreparedModel(std::shared_ptr<torch::nn::Module> module, Communicator communicator);
  void average(const ParallelContext& context, const ModelOptions& options);

  std::shared_ptr<torch::nn::Module> module_;
  Communicator communicator_;
  std::optional<Communicator> channel_;
  // All of the following are null with Parallel::none.
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<BatchNormRanks> statistics_;        ///< connects the model's SyncBatchNorms; null if it has none
  std::unique_ptr<MicroBatchBuffers> micro_batches_;  ///< null without virtual workers
};

}  // namespace muster::detail::gradients
