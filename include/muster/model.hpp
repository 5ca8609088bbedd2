// Data parallelism: options of session.prepare_model, and the scopes that belong to it.
//
// Gradients may lie in memory that the ranks of a node share. A child of fork() has memory of its own in their place:
// nothing that it does with them reaches its parent, and it takes part in no average.
#pragma once

#include <muster/comm_hooks.hpp>
#include <muster/json.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace muster {

namespace detail::gradients {
class DataParallel;
}

enum class Parallel {
  data,  ///< the same weights on all ranks, gradients averaged in backward()
  none,  ///< only moved to the device
};

struct ModelOptions {
  Parallel parallel = Parallel::data;
  /// Gradients that do not lie in node-shared memory travel in buckets of at most this many bytes (a larger one alone),
  /// in the order in which the first backward() has made them. Where a size has no effect, the log says so.
  std::size_t bucket_bytes = std::size_t{4} << 20;
  /// The first bucket, which is ready early.
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  /// How a bucket is averaged, in place of a plain sum; see muster/comm_hooks.hpp. Gradients then do not go through
  /// node-shared memory, and optimizers are not fused.
  CommHook comm_hook = {};
  /// Whether a thread of its own makes the averages while backward() computes. Unless given, where that gains: where a
  /// rank has a core more than threads of torch. For parameters on the CPU; gloo and NCCL have threads anyway.
  std::optional<bool> progress_thread = {};
  /// torch's batch-norms that stand in a torch::nn::Sequential of the model become those of muster/sync_batch_norm.hpp,
  /// with the same parameters and names; any other, one derived from them too, is an Error (ExitCode::usage) that names
  /// it, before anything is changed.
  bool sync_batch_norm = false;
};
void to_json(Json& json, const ModelOptions& options);
void from_json(const Json& json, ModelOptions& options);

/// While it lives, backward() adds up gradients on this rank alone; the first backward() after it averages the sum.
/// Each gradient is weighted by the samples of its own batch when it is added, so batches may be uneven. On every rank
/// alike.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<int> depth) : depth_(std::move(depth)) { ++*depth_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  ~NoSync() { --*depth_; }

 private:
  std::shared_ptr<int> depth_;
};

struct JoinOptions {
  /// Divide the sum of gradients by the number of all ranks, not by that of the ranks that still have batches.
  bool divide_by_initial_world_size = false;
};
void to_json(Json& json, const JoinOptions& options);
void from_json(const Json& json, JoinOptions& options);

/// For loops whose ranks have different numbers of batches. Made by Session::join:
///
///   {
///     auto join = session.join();
///     for (auto& batch : my_own_batches) { …; loss.backward(); optimizer.step(); }
///   }
///
/// A rank that is done stays at the end of the scope and takes part in the others' averages, without a gradient, until
/// all are done. Then all ranks get the parameters and buffers of the rank that has averaged the most, of several the
/// highest. The state of an optimizer is not copied: one with momentum has fallen behind on the ranks that were done
/// early, and is made anew or loaded if training goes on.
///
/// The loop holds no other collective: no GradScaler, no session.mean, no fused optimizer.
class Join {
 public:
  /// Collective.
  Join(const std::vector<std::shared_ptr<detail::gradients::DataParallel>>& models, const JoinOptions& options);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  /// As finish(), but during an exception it only ends the scope on this rank. An error is logged, and raised by the
  /// next backward().
  ~Join();

  /// This rank is done. Collective.
  void finish();

 private:
  std::int64_t ranks_with_a_pass(bool this_one);

  std::shared_ptr<detail::gradients::DataParallel> model_;
  std::int64_t passes_ = 0;  ///< that this rank has averaged
  int exceptions_;           ///< under way when the scope began
  bool finished_ = false;
};

}  // namespace muster
