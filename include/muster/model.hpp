// Data parallelism: the options of session.prepare_model and DataParallel, and the scopes around backward().
//
// Gradients may lie in memory that the ranks of a node share. A child of fork() gets its own copy of it: what the child
// writes there reaches neither its parent nor another rank, and it takes part in no average.
#pragma once

#include <muster/comm_hooks.hpp>
#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace muster {

namespace detail::gradients {
class PreparedModel;
}
namespace detail::step {
struct BatchWeight;
class Steps;
}  // namespace detail::step

enum class Parallel {
  data,  ///< the same weights on all ranks, gradients averaged in backward()
  none,  ///< only moved to the device
};

struct ModelOptions {
  Parallel parallel = Parallel::data;
  /// The most bytes of a bucket; a larger gradient is sent alone. Gradients are sent in buckets if they are on GPUs, if
  /// a communication hook or gloo averages them, or if node-shared memory is too small for them, in the order in which
  /// the first backward() computed them. If a size that you set has no effect, the log says so.
  std::size_t bucket_bytes = std::size_t{4} << 20;
  /// The same for the first bucket of each type. A small first bucket is ready early, so averaging begins early.
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  /// How a bucket is averaged, in place of a plain sum; see muster/comm_hooks.hpp. Gradients then do not go through
  /// node-shared memory, except over several nodes with bf16_compress_hook() or fp16_compress_hook(), and optimizers
  /// are not fused. An Error (ExitCode::usage) with virtual workers.
  CommHook comm_hook = {};
  /// True: a separate thread averages gradients while backward() computes. Empty: it does so if a rank has at least one
  /// core more than threads of torch, since that is faster. Over several nodes, only if several threads may call MPI.
  /// Not for gradients in buckets: the process groups that send them have threads of their own.
  std::optional<bool> progress_thread = {};
  /// Replaces torch's batch-norms in the torch::nn::Sequential containers of the model by those of
  /// muster/sync_batch_norm.hpp, with the same parameters and names. The batch-norms of an ExportedModule are
  /// synchronised too. Any other batch-norm, including a derived class, is an Error (ExitCode::usage) that names it,
  /// before anything is changed.
  bool sync_batch_norm = false;
};

/// While it lives, backward() accumulates gradients on this rank only; the first backward() after it averages the sum.
/// Each gradient is weighted by the samples of its own batch when it is added, so batches may be uneven. Make the same
/// scopes on every rank.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<int> depth) : depth_(std::move(depth)) { ++*depth_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  ~NoSync() { --*depth_; }

 private:
  std::shared_ptr<int> depth_;
};

/// While it lives, every backward() inside it is weighted by one given batch, or by a given weight. Made by
/// Session::step() and DataParallel::step().
class MUSTER_API StepScope {
 public:
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
  ~StepScope();

 private:
  friend class DataParallel;
  friend class Session;
  StepScope(std::shared_ptr<detail::step::Steps> steps, std::shared_ptr<const detail::step::BatchWeight> batch);
  std::shared_ptr<detail::step::Steps> steps_;
  std::int64_t scope_;
};

struct JoinOptions {
  /// True: the sum of gradients is divided by the number of all ranks. False: it is divided by the number of ranks that
  /// still have batches.
  bool divide_by_initial_world_size = false;
};

/// A scope for loops in which ranks have different numbers of batches. Made by join() of Session and DataParallel:
///
///   {
///     auto join = session.join();
///     for (auto& batch : my_own_batches) { …; loss.backward(); optimizer.step(); }
///   }
///
/// A rank that is done waits at the end of the scope and takes part in the others' averages, without a gradient, until
/// all ranks are done. Then all ranks get the parameters and buffers of the rank that averaged most often (of several
/// such ranks, the highest). The optimizer's state is not copied: an optimizer with momentum lags behind on the ranks
/// that finished early; make it again or load its state if training continues.
///
/// The loop must contain no other collective: no GradScaler, no session.mean, no fused optimizer.
class MUSTER_API Join {
 public:
  /// Begins the scope. An Error (ExitCode::usage) unless exactly one model averages gradients. Collective.
  Join(const std::vector<std::shared_ptr<detail::gradients::PreparedModel>>& models, const JoinOptions& options);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  /// Calls finish(); during an exception it only ends the scope on this rank. An error is logged, and thrown by the
  /// next backward().
  ~Join();

  /// Tells the other ranks that this one has no more batches, and waits until all ranks are done. Collective.
  void finish();

 private:
  /// Returns how many ranks begin to average gradients now; `this_one`: true if this rank does. Collective.
  std::int64_t ranks_with_a_round(bool this_one);

  std::shared_ptr<detail::gradients::PreparedModel> model_;
  std::int64_t rounds_ = 0;  ///< how often this rank has averaged gradients in the scope
  int exceptions_;           ///< uncaught exceptions when the scope began
  bool finished_ = false;
};

}  // namespace muster
