// The session: the training function's access to its run.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/communicator.hpp>
#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
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

namespace detail::session {
struct SessionState;
}
namespace detail::data {
struct Worker;
MUSTER_API Worker worker_of(const Session& session);
}  // namespace detail::data

/// Named objects that are saved and restored together, with the session's epoch, position in the data and random state.
/// Refers to the session and must not outlive it. Copies share one State, which lives until the last copy is gone. When
/// the run is asked to stop, the living State that was restored or reported last is saved; a State whose report or
/// restore() has failed does not count.
class MUSTER_API State {
 public:
  /// Loads the checkpoint from which the run continues: its own newest one, or the one it was told to start from.
  /// Returns false on a fresh start. All names, shapes and types are compared first: if one differs, nothing is
  /// changed. From a checkpoint that no run has made (Checkpoint::from_dict), the entries that exist are loaded, and a
  /// warning names those that are missing; returns false if none exists. Throws an Error (ExitCode::usage) after a
  /// report has saved a newer checkpoint. Collective.
  bool restore();

  const StateEntries& entries() const noexcept { return *entries_; }

 private:
  friend class Session;
  State(detail::session::SessionState& session, StateEntries entries);
  detail::session::SessionState* session_;
  std::shared_ptr<const StateEntries> entries_;
};

struct ReportOptions {
  /// True: the report has the mean over the ranks. False: it has the list of the ranks' values, in the order of ranks,
  /// with null for a rank that did not give the key.
  bool reduce = true;
  /// A name for the report's checkpoint, such as "best": RUN/NAME becomes a symbolic link to the checkpoint once it is
  /// complete. If a name is used again, the link moves to the newer checkpoint; it is removed when the last checkpoint
  /// with that name is deleted. The report's row has the name as checkpoint_name, beside checkpoint_dir_name. The same
  /// on all workers. It must not contain '/', begin with '.' or "checkpoint_", or be the name of one of the run's own
  /// files.
  std::string checkpoint_name = {};
  /// True: the checkpoint is validated while training continues; see muster/validation.hpp. An Error (ExitCode::usage)
  /// if the trainer has no validation function, or if the report has nothing to save.
  bool validation = false;
};

/// A checkpoint and the metrics of its report.
struct ReportedCheckpoint {
  Checkpoint checkpoint;
  Json metrics;  ///< including the metrics of its validation
  CheckpointStatus status = CheckpointStatus::committed;
};

/// What the workers know about a coming end of the job (a preemption, a time limit); the same on all of them.
struct Preemption {
  /// True if some worker has been asked to stop, or has just enough time left to save.
  bool asked = false;
  /// The time until the job ends, on the worker that has the least of it; empty if no limit is known.
  std::optional<std::chrono::duration<double>> time_left = {};
};

/// The epochs from the current one to `count` − 1; each iteration tells the session which epoch it is. After a loop
/// that ran to its end, the current epoch is `count`; after a loop that was left early, it is the epoch in which the
/// loop was left. So a second loop to the same count has no epochs, and a warning says so; session.epochs(6) after
/// session.epochs(3) has three.
///
/// A run can continue in the middle of an epoch if its data come from a split dataset or from one of muster's data
/// loaders. For other data (your own, torch's data loaders) the position is unknown: an epoch counts as finished with
/// the first State that is reported in it, so report once, at its end. If a program trains between two reports of such
/// an epoch, there is a warning, and from then on a run that continues repeats the epoch of its State from the start.
/// It is an Error to report a State while the program iterates over, and trains with, a dataset that is whole on each
/// worker.
class MUSTER_API Epochs {
 public:
  class iterator {
   public:
    std::int64_t operator*() const noexcept { return epoch_; }
    iterator& operator++();
    bool operator!=(const iterator& other) const noexcept { return epoch_ < other.epoch_; }

   private:
    friend class Epochs;
    iterator(detail::session::SessionState* session, std::int64_t epoch) : session_(session), epoch_(epoch) {}
    detail::session::SessionState* session_;
    std::int64_t epoch_;
  };
  iterator begin() const;
  iterator end() const;

 private:
  friend class Session;
  Epochs(detail::session::SessionState& session, std::int64_t count) : session_(&session), count_(count) {}
  detail::session::SessionState* session_;
  std::int64_t count_;
};

/// While it lives, the module is in evaluation mode and no gradients are recorded. Afterwards each submodule has its
/// earlier mode again. Made by Session::evaluation().
class MUSTER_API Evaluation {
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

/// Passed to the training function on every worker; lives as long as that call. All workers must make the calls that
/// are marked collective, in the same order and with the same options. The options of prepare_model(),
/// prepare_optimizer(), grad_scaler() and join() are compared: an Error (ExitCode::usage) names the first option that
/// differs.
///
/// Stopping. A run is asked to stop by SIGUSR1, SIGUSR2 or SIGHUP to any worker, by SIGTERM in the cases that
/// Launch::stop_requested() lists, by `touch STORAGE/NAME/stop`, or by its time limit. All workers then stop at the
/// same boundary: the next batch of a training pass, the next epoch or the next report, but not inside join(). While
/// two training passes are open, only an epoch or a report is a boundary. At the boundary, the living State that was
/// restored or reported last is saved without a report, and an Error with ExitCode::stopped is thrown, which passes
/// through the training function like any other exception. If there is no such State, nothing is saved and the code is
/// ExitCode::retry; but if a report has saved the user's own files, the run stops at the next report.
///
/// The exception of a stop ends the attempt even if the training function catches it. The same holds for the exceptions
/// about bad numbers (FailureConfig::bad_numbers), of a Callback that ends training, and of another rank's error. Later
/// collective calls, epochs and training batches throw it again. When the function then returns, or throws another
/// exception, the attempt ends as if the first exception had not been caught.
///
/// Gradients that no optimizer has stepped with yet are saved with the State, by a report as by a stop: their average
/// over the workers, which is in .grad again after State::restore(). Between two batches, workers that accumulate
/// gradients for a later step still go on until that step, for at most 64 batches, as long as there is time for another
/// batch and a save: a program may count the batches of a step itself, and would begin to count anew after a restart.
/// Gradients that the program throws away (as a GAN does with those of the other network's loss) delay the stop by at
/// most one batch, and are not saved from the second report on. Prepared optimizers announce their steps; the steps of
/// other optimizers are detected by the change of the parameters. Of a model that is not prepared, a save leaves out
/// the gradients that wait for a step, with a warning.
///
/// When a Callback ends training, an exception leaves the training function too; this is not a failure.
///
/// The file `stop` in the run's folder is looked for once a second. It is removed once the run has obeyed it or
/// training has ended. The time limit is --time-limit, or else the end of the batch job. A run stops before it by the
/// longest time so far between two boundaries, plus twice its slowest save (three times while a save runs in the
/// background; before the first save, the estimate is three times the bytes of the restored State's parameters at 100
/// MB/s), plus one second. Where there is no boundary, as in a long validation, nothing stops.
class MUSTER_API Session {
 public:
  explicit Session(detail::session::SessionState& state) : state_(&state) {}

  int world_size() const noexcept;
  int world_rank() const noexcept;
  int local_rank() const noexcept;
  int local_world_size() const noexcept;
  int node_rank() const noexcept;
  int num_nodes() const noexcept;
  /// Both return the run's name.
  const std::string& trial_name() const noexcept;
  const std::string& experiment_name() const noexcept;
  const Json& metadata() const noexcept;
  std::uint64_t seed() const noexcept;
  /// Steps of this run so far, including those before a restored checkpoint: a step for each batch of a training pass
  /// over a split dataset or a data loader (see BatchOptions::training); with virtual workers, for all batches of a
  /// step together.
  std::int64_t global_step() const noexcept;
  /// True if the current batch is the last one of its step; always true without ScalingConfig::virtual_workers.
  bool is_step_complete() const noexcept;

  /// This rank's GPU with use_gpu (ScalingConfig), otherwise cpu.
  at::Device get_device() const;
  /// A torch process group of the workers.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;
  /// A communicator of the workers, for the training function's own use.
  const Communicator& communicator() const noexcept;
  /// Returns when all workers have called it. Collective.
  void barrier() const;
  /// Announces that this worker will be busy for `time` with its own work while others may wait for it: their timeout
  /// (--timeout) counts from the end of that time. Long work for which no rank waits need not be announced. A call
  /// replaces the one before; 0 cancels it. Not collective.
  void keep_alive(std::chrono::milliseconds time) const;
  /// The mean over the workers, detached. Use it for a loss on which the program branches, so that all workers take the
  /// same branch. It has the value's type; for whole numbers and booleans it is a double. Collective.
  at::Tensor mean(const at::Tensor& value) const;

  /// Moves the module to the device, copies rank 0's weights and buffers to all workers, and from then on averages
  /// gradients inside backward(): weighted by the number of samples if there is a current batch of a training pass (see
  /// step()), otherwise equally. Returns the same module.
  ///
  /// Parameters must have the same names, shapes and types on all workers. The gradients of embeddings with
  /// sparse(true) are averaged as sparse tensors; with virtual workers they are an Error (ExitCode::usage). A tensor
  /// made by expand() gets memory for each of its elements. On several ranks an embedding with max_norm is an Error
  /// (ExitCode::usage), because its forward() writes to the weights. Collective.
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
  /// Prepares several models: auto [generator, discriminator] = session.prepare_models(g, d);
  template <class... Models>
  std::tuple<Models...> prepare_models(Models... models) {
    return std::tuple<Models...>{prepare_model(std::move(models))...};
  }

  /// Returns the same optimizer, made aware of the other ranks; see muster/optimizer.hpp. Prepare its model first.
  /// Collective.
  template <class O>
  requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
      O optimizer, const OptimizerOptions& options = {}) {
    auto step = prepare_step(optimizer, options);
    return PreparedOptimizer<O>(std::move(optimizer), std::move(step));
  }

  /// While the scope lives, `batch` determines the weights: gradients of a backward() inside it, or the averages of a
  /// fused optimizer's step, are weighted by this batch's samples (Batch::weight). `batch` may come from a pass that is
  /// over. For a data loader, session.step(*loader) means its current batch. Make the same scopes on every rank.
  ///
  ///   { auto as = …, bs = …;       // two datasets, each with its own steps; both ranges end before the report
  ///   for (auto a = as.begin(), b = bs.begin(); a != as.end() && b != bs.end(); ++a, ++b) {
  ///     { auto scope = session.step(*a); loss_of(*a).backward(); }
  ///     { auto scope = session.step(*b); loss_of(*b).backward(); }
  ///     optimizer.step();
  ///   } }
  ///   session.report(metrics, state);
  ///
  /// Without a scope, the current batch of the open training pass determines the weights. With two open passes a scope
  /// is needed, unless both give the same weights: the same count, step and drop_last, and the same position in their
  /// passes. Otherwise backward() throws an Error.
  template <class AnyBatch>
  requires requires(const AnyBatch& batch) {
    { step_weight_of(batch) } -> std::convertible_to<std::shared_ptr<const detail::step::BatchWeight>>;
  }
  [[nodiscard]] StepScope step(const AnyBatch& batch) const { return step_of(step_weight_of(batch)); }

  /// The same for a loss that is no mean over samples: `weight` is the number of items over which this rank's loss is a
  /// mean, such as the tokens that a mask leaves. It need not be a whole number. The gradient is the mean over all
  /// ranks, the sum of weight × gradient over the sum of the weights; under no_sync(), over all backward passes up to
  /// the one that averages. Averages of several backward() add up, as without a weight.
  ///
  ///   const auto count = mask.sum().item<std::int64_t>();
  ///   { auto scope = session.step(batch, count); ((losses * mask).sum() / count).backward(); }
  ///
  /// With weight 0 the loss may be NaN; an empty batch always has weight 0. If the weights of all ranks are 0, no
  /// gradient is averaged and no optimizer steps with it; a warning says so the first time. A weight that is negative,
  /// NaN, infinite, below 1e-9 but not 0, or above 1e12 is an Error (ExitCode::usage); so are weights on some ranks
  /// only, and backward passes with and without a weight that accumulate for one average, or for one step of a fused
  /// optimizer. With weights, fused optimizers do not average in their step, so .grad holds the averages. SyncBatchNorm
  /// leaves out the samples of a rank with weight 0; a model with SyncBatchNorm must call forward() inside the scope,
  /// too. Gradients of 16 bits need weights near 1: before the first average, muster divides the weights by about the
  /// number of samples of a batch, so they should be near it; later, by about the mean of the weights.
  template <class AnyBatch>
  requires requires(const AnyBatch& batch) {
    { step_weight_of(batch) } -> std::convertible_to<std::shared_ptr<const detail::step::BatchWeight>>;
  }
  [[nodiscard]] StepScope step(const AnyBatch& batch, double weight) const {
    return step_of(step_weight_of(batch), weight);
  }

  /// While the scope lives, backward() accumulates gradients locally, without averaging. An Error (ExitCode::usage)
  /// with virtual workers.
  [[nodiscard]] NoSync no_sync() const;
  /// While the scope lives, ranks may have different numbers of batches; see muster/model.hpp. Exactly one model must
  /// be prepared. An Error (ExitCode::usage) with virtual workers. Collective.
  [[nodiscard]] Join join(const JoinOptions& options = {}) const;
  /// While the scope lives, forward passes on the session's device compute in 16 bits where that is safe.
  [[nodiscard]] Autocast autocast(const AutocastOptions& options = {}) const;
  /// The scaler that half precision needs; it must not outlive the session. Collective.
  GradScaler grad_scaler(const GradScalerOptions& options = {}) const;
  /// Replaces batch-norm's running statistics by their means over the workers (num_batches_tracked: by rank 0's), in
  /// every prepared model that shares a module with this one. Then this module is in evaluation mode while the scope
  /// lives. Other buffers keep this worker's values; with virtual workers they become those of the first micro-batch. A
  /// report averages the statistics of all prepared models in the same way. Collective.
  [[nodiscard]] Evaluation evaluation(std::shared_ptr<torch::nn::Module> module) const;
  template <ModuleHolder Holder>
  [[nodiscard]] Evaluation evaluation(const Holder& holder) const {
    return evaluation(std::shared_ptr<torch::nn::Module>(holder.ptr()));
  }

  /// This worker's shard of the dataset of that name.
  DatasetShard get_dataset_shard(const std::string& name = "train") const;

  /// Returns a State of these objects, which report() saves and State::restore() loads.
  State state(StateEntries entries) const;
  /// for (auto epoch : session.epochs(10)) begins at the epoch at which a restored run stopped.
  Epochs epochs(std::int64_t count) const;

  /// Reduces the metrics over the workers, writes them to the run's folder, and commits a checkpoint if there is
  /// something to save. A barrier. An error on one worker is thrown on all of them, and the earlier checkpoints remain.
  /// A report that throws before its checkpoint is committed has not happened: the counts of reports and the callbacks
  /// (Callback::on_failed_report) are as before, and so are the optimizers' options and the schedulers of the State.
  /// Where the best checkpoints are kept by a score: if no report had that metric by the first report at an epoch's
  /// end, that report is an Error, unless the trainer has a validation function, which may give the metric; a
  /// checkpoint whose report lacks the metric, or has NaN, counts as the worst. Collective.
  void report(const Metrics& metrics, const ReportOptions& options = {});
  /// Also saves the state, by all workers together.
  void report(const Metrics& metrics, const State& state, const ReportOptions& options = {});
  /// Saves the user's own files, or entries (Checkpoint::from_dict, or an earlier checkpoint). The files of several
  /// workers are combined; of files with the same name the lowest worker's is kept, with a warning if they differ.
  void report(const Metrics& metrics, const Checkpoint& checkpoint, const ReportOptions& options = {});
  /// Saves both the state and the checkpoint; if both have an entry of the same name, the state's is saved.
  void report(const Metrics& metrics, const State& state, const Checkpoint& checkpoint,
              const ReportOptions& options = {});

  /// Adds a point to the curve `name` in TensorBoard, at the session's global_step; where muster counts no steps, at
  /// the number of the coming report. Only the first worker's values are shown; nothing happens without
  /// RunConfig::tensorboard. Throws an Error (ExitCode::user_error) if the name is empty or not UTF-8. Not collective.
  void log_scalar(const std::string& name, double value) const;
  /// The same for a picture: [height, width] or [channels, height, width] with 1 (grey), 3 (RGB) or 4 (RGBA) channels,
  /// of bytes, or of floating-point numbers from 0 to 1. Throws an Error (ExitCode::user_error) for other shapes and
  /// types, for an empty picture, and for a height or width above 65,535.
  void log_image(const std::string& name, const at::Tensor& image) const;

  /// For your own loops: true if any worker has been asked to stop. Then report a State, which saves it and ends
  /// training, or return. If the training function returns after this was true, the run is not finished: it ends as
  /// stopped (with ExitCode::retry if nothing was saved), and continues when it is started again. Collective.
  bool should_stop();

  /// Adds a callback for the rest of this call of the training function; it may refer to the function's objects. Like
  /// those of RunConfig, it receives events until the training function returns or throws. All workers must add the
  /// same one. Collective.
  void add_callback(std::shared_ptr<Callback> callback);

  /// Like should_stop(), but also returns the time that is left. It ends nothing by itself. As with should_stop(), the
  /// run is not finished if the training function returns after `asked` was true. Collective.
  Preemption preemption();

  /// The newest committed checkpoint, or the one the run was told to start from. Waits for a checkpoint that is still
  /// being written in the background. A function that loads it without State::restore() starts with epoch, global_step,
  /// position in the data and random state from the beginning; a warning says so.
  std::optional<Checkpoint> get_checkpoint() const;
  /// The checkpoints of this run that still exist, oldest first. Waits for one that is still being written. Collective.
  std::vector<ReportedCheckpoint> get_all_reported_checkpoints() const;

  /// Returns rank 0's value on every worker; the values that other workers give are ignored. Collective.
  Json broadcast_from_rank_zero(const Json& value) const;
  /// RUN/artifacts, created on the first call: for your own files, which are in no checkpoint and are never deleted.
  std::filesystem::path artifacts() const;

  // For a Backend (muster/trainer.hpp).

  /// The launch's flags, among them --backend and --timeout.
  const LaunchFlags& flags() const noexcept;
  /// Sets the function that makes a process group of all workers. It is called now, for process_group(), and again for
  /// each prepared model and for its SyncBatchNorms. `make` is collective.
  void set_process_group(std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> make);
  /// True if an exception has ended training on this worker.
  bool failed() const noexcept;

 private:
  friend detail::data::Worker detail::data::worker_of(const Session& session);
  void prepare(const std::shared_ptr<torch::nn::Module>& module, const ModelOptions& options);
  detail::optim::Prepared prepare_step(torch::optim::Optimizer& optimizer, const OptimizerOptions& options);
  StepScope step_of(std::shared_ptr<const detail::step::BatchWeight> batch) const;
  StepScope step_of(const std::shared_ptr<const detail::step::BatchWeight>& batch, double weight) const;
  detail::session::SessionState* state_;
};

}  // namespace muster
