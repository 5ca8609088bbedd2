// What a training function sees of its run.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/communicator.hpp>
#include <muster/dataset.hpp>
#include <muster/json.hpp>
#include <muster/metrics.hpp>
#include <muster/mixed_precision.hpp>
#include <muster/model.hpp>
#include <muster/optimizer.hpp>
#include <muster/process_group.hpp>
#include <muster/state.hpp>

#include <c10/core/Device.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace muster {

class Callback;
class Session;
struct LaunchFlags;

namespace detail::train {
struct SessionState;
}
namespace detail::data {
struct Worker;
Worker worker_of(const Session& session);
}  // namespace detail::data
namespace detail::step {
struct BatchWeight;
class Steps;
}  // namespace detail::step

/// Named objects that are saved and restored together, with the session's epoch, position in the data and random
/// state. Refers to the session: does not outlive it. Copies are one State: it lives until the last of them is gone,
/// and while it lives, the one that was last restored or reported is what is saved when the run is asked to stop.
class State {
 public:
  /// Loads the checkpoint that the run goes on from: its own newest, or the one it was told to start from. False on a
  /// fresh start. Everything is compared first: nothing is changed if a name, a shape or a type differs. From a
  /// checkpoint that no run has made (Checkpoint::from_dict) it takes the entries that are there, with a warning that
  /// names the missing, and gives false where none is. An Error (ExitCode::usage) once a report has saved another one.
  /// Collective.
  bool restore();

  const StateEntries& entries() const noexcept { return *entries_; }

 private:
  friend class Session;
  State(detail::train::SessionState& session, StateEntries entries);
  detail::train::SessionState* session_;
  std::shared_ptr<const StateEntries> entries_;
};

struct ReportOptions {
  /// Keep the list over the ranks in place of the mean, by rank; null for a rank that has not given the key.
  bool reduce = true;
  /// A name for the report's checkpoint, as "best": RUN/NAME becomes a symbolic link to it as soon as it is whole. A
  /// name that is used again goes over to the newer one, and goes with the last one that it names. The row has it as
  /// checkpoint_name, beside checkpoint_dir_name. The same on all workers; no '/', no leading '.' or "checkpoint_",
  /// none of the run's own files.
  std::string checkpoint_dir_name = {};
  /// Have the checkpoint validated beside training; see muster/validation.hpp. An Error (ExitCode::usage) where the
  /// trainer has no such function, or the report nothing to save.
  bool validation = false;
};
void to_json(Json& json, const ReportOptions& options);
void from_json(const Json& json, ReportOptions& options);

/// A checkpoint and the metrics of its report.
struct ReportedCheckpoint {
  Checkpoint checkpoint;
  Json metrics;  ///< and those of its validation
  CheckpointStatus status = CheckpointStatus::committed;
};

/// What a worker knows of the end that somebody else prepares for the run.
struct Preemption {
  /// Some worker has been asked to stop, or its time is over.
  bool asked = false;
  /// Until the job is to be over, on the worker that has least; empty where nothing says so.
  std::optional<std::chrono::nanoseconds> time_left = {};
};

/// Epochs from where the run stands to `count`; each step tells the session which one it is. After a loop that has come
/// to its end that is the next epoch, after one that was left the same. So a second loop to the same count has no
/// epoch, which is a warning; session.epochs(6) after session.epochs(3) has three.
///
/// A run goes on in the middle of an epoch where its data come from a split dataset or a data loader of muster's. Of
/// other data (your own, torch's data loaders) nobody knows the middle: an epoch counts as over with the first State
/// that is reported in it, so report once, at its end. Where a program trains between two reports of an epoch, there is
/// a warning, and from then on a run that goes on begins the epoch of its State again. While a dataset that is whole on
/// each worker is iterated over and trained with, a report with a State is an Error.
class Epochs {
 public:
  class iterator {
   public:
    std::int64_t operator*() const noexcept { return epoch_; }
    iterator& operator++();
    bool operator!=(const iterator& other) const noexcept { return epoch_ < other.epoch_; }

   private:
    friend class Epochs;
    iterator(detail::train::SessionState* session, std::int64_t epoch) : session_(session), epoch_(epoch) {}
    detail::train::SessionState* session_;
    std::int64_t epoch_;
  };
  iterator begin() const;
  iterator end() const;

 private:
  friend class Session;
  Epochs(detail::train::SessionState& session, std::int64_t count) : session_(&session), count_(count) {}
  detail::train::SessionState* session_;
  std::int64_t count_;
};

/// While it lives, the module is in evaluation mode and no gradients are recorded. Made by Session::evaluation.
class Evaluation {
 public:
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;
  ~Evaluation();

 private:
  friend class Session;
  explicit Evaluation(std::shared_ptr<torch::nn::Module> module);
  struct Saved;
  std::unique_ptr<Saved> saved_;
};

/// While it lives, one batch counts for every backward() inside. Made by Session::step.
class StepScope {
 public:
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
  ~StepScope();

 private:
  friend class Session;
  StepScope(std::shared_ptr<detail::step::Steps> steps, std::shared_ptr<const detail::step::BatchWeight> batch);
  std::shared_ptr<detail::step::Steps> steps_;
  std::int64_t scope_;
};

/// Given to the training function, on every worker; lives as long as that call. What is marked collective is called by
/// all workers alike.
///
/// Asked to stop (SIGUSR1, SIGUSR2 or SIGHUP to any worker, SIGTERM under srun, `touch STORAGE/NAME/stop`, the time:
/// see below), all workers stop at the same boundary: the next batch of a training pass, the next epoch or report,
/// where no gradients are added up for a later step, outside of join(). The State that was last restored or reported,
/// if it still lives, is saved without a report, and an Error with ExitCode::stopped is thrown there; it passes through
/// the training function like any other. Where there is no such State nothing is saved and the code is ExitCode::retry;
/// if a report has saved files of the user's own, the next report is waited for. While batches of two training passes
/// are in hand, the boundary is the next epoch or report.
///
/// What is added up for a later step is waited for while there is time for another batch and a save. Gradients that the
/// program throws away, as a GAN does with those that its other loss leaves, and those that no optimizer steps with are
/// not waited for, or for one batch. Prepared optimizers say when they step; of others it is seen by the parameters.
///
/// Where a Callback ends training, an exception leads out of the training function too; that is no failure.
///
/// The file `stop` in the run's folder is looked for once a second, and removed when it has been obeyed or training has
/// ended. --time-limit, or else SLURM_JOB_END_TIME, is when all is to be over: a run stops as much before it as it has
/// taken at most from one boundary to the next, and twice its slowest save (before the first one: three times its
/// parameters at 100 MB/s), and a second. Nothing stops where there is no boundary, as in a long validation.
class Session {
 public:
  explicit Session(detail::train::SessionState& state) : state_(&state) {}

  int world_size() const noexcept;
  int world_rank() const noexcept;
  int local_rank() const noexcept;
  int local_world_size() const noexcept;
  int node_rank() const noexcept;
  int num_nodes() const noexcept;
  /// The run's name, which both are.
  const std::string& trial_name() const noexcept;
  const std::string& experiment_name() const noexcept;
  const Json& metadata() const noexcept;
  std::uint64_t seed() const noexcept;
  /// Steps of this run so far, those before a restored checkpoint counted: batches of training passes over split
  /// datasets and data loaders (see BatchOptions::training).
  std::int64_t global_step() const noexcept;
  /// Whether the batch in hand is the last of its step, which is always so without ScalingConfig::virtual_workers.
  bool step_complete() const noexcept;

  /// cuda:local_rank with use_gpu, else cpu.
  at::Device get_device() const;
  /// The workers as a torch process group.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;
  /// The workers, over a channel for the training function's own use.
  const Communicator& communicator() const noexcept;
  /// Collective.
  void barrier() const;
  /// Announces that this worker is busy for so long with work of its own, while others may wait for it: their limit
  /// (--timeout) counts from the end of that time. Long work for which nobody waits need not be announced. Another call
  /// takes the place of the one before; 0 takes it back. Not collective.
  void keep_alive(std::chrono::milliseconds time) const;
  /// The mean over the workers, detached; needed by whoever branches on a loss. In the value's type; that of whole
  /// numbers and booleans is a double. Collective.
  at::Tensor mean(const at::Tensor& value) const;

  /// Moves the module to the device, gives all workers rank 0's weights and buffers, and from then on averages
  /// gradients inside backward(): weighted by samples while a batch of a training pass is in hand (see step()), equally
  /// otherwise.
  /// The same module comes back. Parameters must have the same names and shapes everywhere. The gradients of embeddings
  /// with sparse(true) are averaged as sparse ones. A tensor made by expand() gets memory for each of its elements. On
  /// several ranks an embedding with max_norm is an Error (ExitCode::usage): its forward() writes to the weights.
  /// Collective.
  template <class M>
  requires std::convertible_to<M*, torch::nn::Module*> std::shared_ptr<M> prepare_model(
      std::shared_ptr<M> module, const ModelOptions& options = {}) {
    prepare(module, options);
    return module;
  }
  template <ModuleHolder Holder>
  Holder prepare_model(Holder holder, const ModelOptions& options = {}) {
    prepare(holder.ptr(), options);
    return holder;
  }
  /// Several at once: auto [generator, discriminator] = session.prepare_models(g, d);
  template <class... Models>
  std::tuple<Models...> prepare_models(Models... models) {
    return std::tuple<Models...>{prepare_model(std::move(models))...};
  }

  /// The same optimizer, which knows of the other ranks; see muster/optimizer.hpp. Its model is prepared before it.
  /// Collective.
  template <class O>
  requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
      O optimizer, const OptimizerOptions& options = {}) {
    auto step = prepare_step(optimizer, options);
    return PreparedOptimizer<O>(std::move(optimizer), std::move(step));
  }

  /// While the scope lives, it is `batch` that counts: the gradients of a backward() inside, or what a fused
  /// optimizer's step averages, are weighted by its samples (Batch::weight). `batch` may be kept from a pass that is
  /// over; of a data loader, session.step(*loader), it is the one in hand. On every rank alike.
  ///
  ///   { auto as = …, bs = …;       // two datasets, of which each has its own steps; both ranges end before the report
  ///   for (auto a = as.begin(), b = bs.begin(); a != as.end() && b != bs.end(); ++a, ++b) {
  ///     { auto scope = session.step(*a); loss_of(*a).backward(); }
  ///     { auto scope = session.step(*b); loss_of(*b).backward(); }
  ///     optimizer.step();
  ///   } }
  ///   session.report(metrics, state);
  ///
  /// Without a scope it is the batch of the training pass in hand. Of two passes in hand, it need not be said while
  /// they weigh the same: same count, step and drop_last, and as far in their passes; else backward() throws an Error.
  template <class AnyBatch>
  requires requires(const AnyBatch& batch) {
    { batch.step() } -> std::convertible_to<std::shared_ptr<const detail::step::BatchWeight>>;
  }
  [[nodiscard]] StepScope step(const AnyBatch& batch) const { return step_of(batch.step()); }

  /// While the scope lives, backward() adds up gradients locally.
  [[nodiscard]] NoSync no_sync() const;
  /// While the scope lives, ranks may have different numbers of batches; see muster/model.hpp. There is one prepared
  /// model. Collective.
  [[nodiscard]] Join join(const JoinOptions& options = {}) const;
  /// While the scope lives, forward passes on the session's device compute in 16 bits where that is safe.
  [[nodiscard]] Autocast autocast(const AutocastOptions& options = {}) const;
  /// The scaler that half precision needs; it must not outlive the session. Collective.
  GradScaler grad_scaler(const GradScalerOptions& options = {}) const;
  /// Batch-norm's running statistics become the mean over the workers (num_batches_tracked: rank 0's), in every
  /// prepared model that has a module in common with this one; then this one is in evaluation mode while the scope
  /// lives. Other buffers stay this worker's own; with virtual workers they become those of the first micro-batch. A
  /// report does the same with all prepared models. Collective.
  [[nodiscard]] Evaluation evaluation(std::shared_ptr<torch::nn::Module> module) const;
  template <ModuleHolder Holder>
  [[nodiscard]] Evaluation evaluation(const Holder& holder) const {
    return evaluation(std::shared_ptr<torch::nn::Module>(holder.ptr()));
  }

  /// This worker's view of the dataset of that name.
  DatasetShard get_dataset_shard(const std::string& name = "train") const;

  /// What report() saves and restore() loads.
  State state(StateEntries entries) const;
  /// for (auto epoch : session.epochs(10)), beginning where a restored run stopped.
  Epochs epochs(std::int64_t count) const;

  /// Reduces the metrics over the workers, writes them to the run's directory, and commits a checkpoint if there is
  /// something to save. A barrier; an error on one worker is the same error on all, and the checkpoints before it
  /// stay. Where the best checkpoints are kept by a score, it is an error at the first one that is not in the middle of
  /// an epoch if no report has had that metric; one whose report lacks it, or has it as NaN, counts as the worst.
  /// Collective.
  void report(const Metrics& metrics, const ReportOptions& options = {});
  /// With the state, saved by all workers together.
  void report(const Metrics& metrics, const State& state, const ReportOptions& options = {});
  /// With files of the user's own, or entries (Checkpoint::from_dict, or one that was saved before). Those of several
  /// workers are united; what several give is the lowest worker's, with a warning if theirs differ.
  void report(const Metrics& metrics, const Checkpoint& checkpoint, const ReportOptions& options = {});
  /// With both; an entry that both hold is the state's.
  void report(const Metrics& metrics, const State& state, const Checkpoint& checkpoint,
              const ReportOptions& options = {});

  /// For a loop of one's own: whether any worker has been asked to stop. Report a State then, which saves it and ends
  /// training, or return. A run whose function returns after this has said so is not finished: it ends as a stop does,
  /// and goes on when it is started again. Collective.
  bool should_stop();

  /// A callback of this call's own, which may refer to its objects: beside those of RunConfig it is told of what comes
  /// until the training function has returned or thrown. On all workers alike; collective.
  void add_callback(std::shared_ptr<Callback> callback);

  /// The same for a loop that wants to know more: whether the run's place is wanted, and how long it has. It ends
  /// nothing by itself; what is said there of a function that returns is true here too. Collective.
  Preemption preemption();

  /// The newest committed one, for which it waits while that is being written behind training, or the one the run was
  /// told to start from. A function that loads it without
  /// State::restore() begins again with epoch, global_step, position in the data and random state; a warning says so.
  std::optional<Checkpoint> get_checkpoint() const;
  /// Those of this run that are there, oldest first; waits for one that is being written. Collective.
  std::vector<ReportedCheckpoint> get_all_reported_checkpoints() const;

  /// Rank 0's value on every worker; that of the others is not looked at. Collective.
  Json broadcast_from_rank_zero(const Json& value) const;
  /// RUN/artifacts, made when it is first asked for: for files of your own, which no checkpoint has and nothing prunes.
  std::filesystem::path artifacts() const;

  // For a Backend.

  /// Those of the launch: what --backend and --timeout ask for, among others.
  const LaunchFlags& flags() const noexcept;
  /// How a process group over all workers is made, which is done now for process_group() and again for each prepared
  /// model. `make` is collective.
  void set_process_group(std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> make);
  /// Whether training has ended on this worker with an exception.
  bool failed() const noexcept;

 private:
  friend detail::data::Worker detail::data::worker_of(const Session& session);
  void prepare(const std::shared_ptr<torch::nn::Module>& module, const ModelOptions& options);
  std::unique_ptr<detail::optim::OptimizerStep> prepare_step(torch::optim::Optimizer& optimizer,
                                                             const OptimizerOptions& options);
  StepScope step_of(std::shared_ptr<const detail::step::BatchWeight> batch) const;
  detail::train::SessionState* state_;
};

}  // namespace muster
