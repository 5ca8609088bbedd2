// Data parallelism in a program that keeps its own loop: no launch, no session, no folder of a run.
//
//   MPI_Init(&argc, &argv);
//   {
//     Net net;
//     torch::optim::SGD optimizer(net->parameters(), 0.1);
//     muster::DataParallel parallel(muster::from_mpi(MPI_COMM_WORLD), net);   // rank 0's weights on all ranks
//     for (auto& batch : my_batches) {
//       optimizer.zero_grad();
//       loss_of(net, batch).backward();                                       // .grad has the mean over the ranks
//       optimizer.step();
//     }
//   }
//   MPI_Finalize();
//
// It is what a session does for its models (Session::prepare_model), and works from MPI_THREAD_SINGLE on; NCCL, for
// models on GPUs, needs MPI_THREAD_MULTIPLE. Everything else in the process stays as it is: signal handlers, malloc,
// the CPUs of threads, torch's seeds and threads, MPI, the process's end. docs/own-loop.md says what that costs.
#pragma once

#include <muster/communicator.hpp>
#include <muster/detail/export.hpp>
#include <muster/model.hpp>
#include <muster/optimizer.hpp>
#include <muster/state.hpp>

#include <chrono>
#include <concepts>
#include <filesystem>
#include <memory>
#include <utility>

namespace muster {

struct DataParallelOptions {
  /// The longest wait for other ranks, in every collective call and in backward(). After that time, the call throws an
  /// Error (ExitCode::retry) that names the late ranks. The same on all ranks.
  std::chrono::milliseconds timeout = std::chrono::seconds(1800);
  ModelOptions model = {};
};

/// Averages a model's gradients over ranks, in every backward(), as long as it lives; afterwards the model is an
/// ordinary one again. It shares ownership of the module. Any number of these objects may live at once, over the same
/// ranks or over others, and they may be destroyed in any order. After MPI_Finalize the destructor does nothing, and
/// calls that need other ranks are an Error (ExitCode::usage).
///
/// All ranks make the same collective calls in the same order, with the same options, and run the same backward(). Each
/// backward() must reach a parameter on every rank: a rank without a batch takes part with a weight of 0 (step()).
/// Errors are thrown as muster::Error. Those of save() and load(), and of options that differ, are the same on all
/// ranks. After an exception in backward() that all ranks catch, call zero_grad() on all of them and go on. If an
/// exception ends the life of this object on one rank, the waits of the other ranks throw a RemoteError at once, which
/// names the rank with the exception.
///
/// Calls are made on MPI's main thread below MPI_THREAD_SERIALIZED, and always by one thread at a time.
class MUSTER_API DataParallel {
 public:
  /// Compares the model's names, shapes and types over the ranks, copies rank 0's weights and buffers to all of them,
  /// in place, and averages gradients from then on. The module stays on the device of its first parameter; parameters
  /// on other devices are moved there. `ranks` is a communicator of from_mpi() (muster/mpi.hpp) or of a Launch; its own
  /// timeout stays as it is. Errors are those of Session::prepare_model. Collective.
  DataParallel(const Communicator& ranks, std::shared_ptr<torch::nn::Module> module,
               const DataParallelOptions& options = {});
  template <ModuleHolder Holder>
  DataParallel(const Communicator& ranks, const Holder& holder, const DataParallelOptions& options = {})
      : DataParallel(ranks, std::shared_ptr<torch::nn::Module>(holder.ptr()), options) {}
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;
  ~DataParallel();

  /// Returns the same optimizer, made aware of the other ranks; see muster/optimizer.hpp. It may outlive this object,
  /// and is then an ordinary one; if it is fused over several nodes, call gather_state() before. Collective.
  template <class O>
  requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
      O optimizer, const OptimizerOptions& options = {}) {
    auto step = prepare_step(optimizer, options);
    return PreparedOptimizer<O>(std::move(optimizer), std::move(step));
  }

  /// While the scope lives, backward() accumulates gradients locally, without averaging.
  [[nodiscard]] NoSync no_sync() const;
  /// While the scope lives, this rank's loss counts with `weight`: the number of samples, or of other items, over which
  /// the loss is a mean. The gradient is the sum of weight × gradient over the sum of the weights; see
  /// Session::step(batch, weight) for the limits. Make the same scopes on every rank.
  [[nodiscard]] StepScope step(double weight) const;
  /// While the scope lives, ranks may have different numbers of batches; see muster/model.hpp. Collective.
  [[nodiscard]] Join join(const JoinOptions& options = {}) const;
  /// Replaces batch-norm's running statistics by their means over the ranks; num_batches_tracked becomes rank 0's.
  /// Other buffers stay as they are on each rank. Call it before evaluation and before save(). Collective.
  void average_buffers();

  /// All ranks together write `state` to `folder`; use it for nothing else. A complete and durable new state replaces
  /// the earlier one; if a rank fails, the earlier one stays, and all ranks throw the same Error. Gradients and torch's
  /// random state are not saved. An Error (ExitCode::usage) for the folder of a run or a checkpoint. Collective.
  void save(const std::filesystem::path& folder, const StateEntries& state);
  /// Loads what save() has written, at any number of ranks; entries of per_rank() need the same number. Returns false
  /// if nothing was saved. Throws an Error (ExitCode::data) if the saved state is damaged, or if names, shapes or types
  /// differ; then nothing was changed. Collective.
  bool load(const std::filesystem::path& folder, const StateEntries& state);

 private:
  detail::optim::Prepared prepare_step(torch::optim::Optimizer& optimizer, const OptimizerOptions& options);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
