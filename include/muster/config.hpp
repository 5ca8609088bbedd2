// The options of a run: structs with a default for every field, set by designated initialisers. C++ requires them in
// the order of the fields: {.num_workers = 2, .use_gpu = true} compiles, the other order does not.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

class Callback;

/// The training function's configuration: set by the program, a file (--config) and flags (--set key=value), and saved
/// with the run.
using Config = Json;

/// How many ranks train: `4`, or `{2, 4}`: at least 2 ranks, at most 4. Default: all ranks of the launch.
class NumWorkers {
 public:
  NumWorkers() = default;
  NumWorkers(int count) : least_(count), most_(count) {}
  NumWorkers(std::optional<int> count) : least_(count), most_(count) {}
  NumWorkers(int least, int most) : least_(least), most_(most) {}

  /// The bounds, which are equal for a fixed number; both are empty if all ranks train.
  std::optional<int> least() const noexcept { return least_; }
  std::optional<int> most() const noexcept { return most_; }
  bool is_range() const noexcept { return least_ != most_; }
  bool operator==(const NumWorkers&) const = default;

 private:
  std::optional<int> least_ = {}, most_ = {};
};

struct ScalingConfig {
  /// The number of workers. More workers than ranks is an Error (ExitCode::usage). The other ranks validate checkpoints
  /// (TrainerOptions::validation) or wait in fit(), and get the same Result. With {least, most} as many ranks train as
  /// there are, up to `most`; `muster run` then starts the program with fewer ranks if not all are available, at least
  /// `least` or --min-workers. The number of samples per step stays the same.
  NumWorkers num_workers = {};
  /// True: train on cuda:local_rank or, if another launch uses that GPU, on a free one. An error if there is none.
  bool use_gpu = false;
  /// Threads of torch per rank; empty: the launch's choice.
  std::optional<int> threads_per_worker = {};
  /// Gives the same weights, bit for bit, at any number of workers that divides this number, even if it changes from
  /// one start to the next (with the same library and threads per worker). A step has this many micro-batches, and each
  /// worker takes several of them, one after the other. Gradients are summed in the order of the micro-batches, and
  /// random state and batch statistics belong to the micro-batch. `batch_size` is the size of a micro-batch. Each batch
  /// has one backward().
  ///
  /// The training function stays as it is: until the last batch of a step, muster removes the gradients from .grad
  /// after backward(), so that zero_grad() and the optimizer's step() find none, and EMA::update() and
  /// GradScaler::update() change nothing. Gradients that an earlier step left in .grad return at the end of the step,
  /// added to its average; if the step is left early, the next backward() is an Error. A schedule does not know about
  /// micro-batches: step it, and do whatever else belongs to a whole step, only if session.is_step_complete().
  std::optional<int> virtual_workers = {};
};
MUSTER_API void to_json(Json& json, const ScalingConfig& options);
MUSTER_API void from_json(const Json& json, ScalingConfig& options);

enum class ScoreOrder { max, min };

/// What a report that has something to save does while the previous checkpoint is still being written.
enum class WhenBusy {
  wait,  ///< it waits until that checkpoint has been written
  drop,  ///< it goes on without a checkpoint (its row has no checkpoint_dir_name), unless the run must stop
};

struct CheckpointConfig {
  /// How many checkpoints stay on disk; empty: all. The newest one always stays, in addition to the best ones, and so
  /// does one whose validation is pending (muster/validation.hpp).
  std::optional<int> num_to_keep = {};
  /// The reported metric by which the best checkpoints are kept; if empty, the newest are kept.
  std::string checkpoint_score_attribute = {};
  ScoreOrder checkpoint_score_order = ScoreOrder::max;
  /// True: a report with a state returns as soon as everything to save has been copied, and a thread of each rank
  /// writes it while training continues; one save at a time. The copy takes memory: on each rank as much as the rank
  /// writes, that is, a share of the state that is the same on all ranks, and all of the rank's own state. The
  /// parameters and state of a fused optimizer (prepare_optimizer) are not copied: its next step leaves the old values
  /// where they are and writes the new ones to other memory. So each node holds them twice from the start on, and a
  /// parameter's memory changes with each save. Over several nodes, or if /dev/shm has no room, they are copied.
  ///
  /// Before the report returns, the ranks' states are compared and your own files are copied. An error in writing is
  /// thrown, on every rank, by the first report after it, which does nothing else, or at the end of training. Training
  /// does not end before the last save has been written, and a time limit leaves time for it. The save of a stop on
  /// request is not asynchronous. If the job is killed during a save, that save is lost, and its row is removed from
  /// result.json when the run is continued.
  bool async_save = false;
  WhenBusy when_busy = WhenBusy::wait;
  /// A folder on each node's own disk or in its memory, such as /dev/shm. A checkpoint is first written and made
  /// durable there, each node's share on that node; then it is copied to the run's folder in the background, and
  /// removed. One save at a time; when_busy says what a report does meanwhile. A checkpoint that could not be copied
  /// stays there until the next one is complete, so there must be room for two. A run that is continued finishes an
  /// interrupted copy if the nodes with its shares are available again. Otherwise it continues, with a warning, from
  /// the run's folder, the only place where Result looks. Empty: no fast tier.
  std::filesystem::path fast_tier = {};
};
MUSTER_API void to_json(Json& json, const CheckpointConfig& options);
MUSTER_API void from_json(const Json& json, CheckpointConfig& options);

/// What happens to an optimizer's step if an averaged gradient is NaN or infinite. This is checked at each step of all
/// prepared optimizers (Session::prepare_optimizer), and all workers take or skip the step alike. For `stop`, `skip`
/// and `roll_back`, a model without a prepared optimizer is an Error (ExitCode::usage), and so is LBFGS. The loss
/// itself is not checked: a NaN loss shows in its gradients, and an infinite loss with finite gradients does not harm
/// the weights. A GradScaler checks before this, and skips bad steps by its own rule.
///
/// For a fused optimizer the check is part of averaging or clipping, except as `skip` says. For other optimizers it
/// reads the averages once.
enum class BadNumbers {
  /// Gradients are not checked.
  ignore,
  /// An Error (ExitCode::user_error) that names the step and, if known, the parameter and the rank. A fused optimizer
  /// may already have changed the weights in this step; the checkpoints are from before it.
  stop,
  /// The step is skipped: weights and the optimizer's state stay as they are, and the loop continues. A report warns
  /// with the number of skipped steps. What the forward pass has changed stays changed, such as batch-norm statistics.
  /// With a fused optimizer and no max_grad_norm, this reads all gradients once more.
  skip,
  /// The training function begins again from the newest checkpoint, as after a failure, but this does not count as one.
  /// It gets the same batches, and skips the step that was bad. If the job is started again, the new processes do not
  /// know that step, and training goes back once more.
  roll_back,
};

struct FailureConfig {
  /// How many failures, without progress between them, are each followed by another attempt from the newest checkpoint:
  /// 0 none, -1 no limit. The count begins anew if the newest checkpoint is of a later batch or epoch than at every
  /// failure before. If muster counts no batches, a later report that saves another state counts as progress too. After
  /// an error that all ranks know of, the next attempt begins inside the job: at once, then after 1, 2, 4 … s, at most
  /// a minute. Errors for which is_worth_retrying() is false, such as those of usage (64) and of data (65), end the
  /// job. After a lost or stuck rank (ExitCode::retry) `muster run` starts the job again. Objects outside of the
  /// training function stay as the failed attempt has left them, unless a State restores them: make optimizers and
  /// schedulers inside.
  int max_failures = 0;
  /// The same limit for ends of the job that are not the program's fault, which `muster run` counts separately: a lost
  /// node, or SIGTERM to ranks that do not handle it, as when a scheduler needs the nodes for another job.
  int max_preemption_failures = -1;
  BadNumbers bad_numbers = BadNumbers::ignore;
  /// How many steps in a row may be skipped (skip), or how often the run may go back to the same checkpoint
  /// (roll_back); one more is an Error as with BadNumbers::stop. -1: no limit.
  int bad_numbers_limit = 10;
};
MUSTER_API void to_json(Json& json, const FailureConfig& options);
MUSTER_API void from_json(const Json& json, FailureConfig& options);

/// Logging options.
struct LoggingConfig {
  /// trace, debug, info, warn, error or off; empty: info. The flag --log-level overrides it.
  std::string level = {};
  /// True: the log is also written to the run's folder, as logs/rank_00000.log.
  bool file = true;
  /// True: a file for each rank. False: only rank 0's.
  bool per_rank = true;
};
MUSTER_API void to_json(Json& json, const LoggingConfig& options);
MUSTER_API void from_json(const Json& json, LoggingConfig& options);

/// A trace of some steps, in which ui.perfetto.dev or chrome://tracing shows what each thread of each rank did and
/// when, on one clock: waiting for data, forward, backward, the reduction of each bucket, the network, the optimizer,
/// reports, saves, and the waits for other ranks with the rank that was last. It is written to the run's folder, as
/// trace_FIRST_LAST.json, by the first report after the steps, or at the end of training; a start that fails before
/// that writes none. A rank records at most 65,536 events; when there are more, the oldest are left out.
struct ProfileConfig {
  /// True: the trace is recorded. The flag --profile turns it on, too.
  bool enabled = false;
  /// The steps, as the row's global_step counts them; both 0: the 11th to the 20th step of each start. The flag
  /// --profile=FIRST:LAST overrides them.
  std::int64_t first_step = 0, last_step = 0;
  /// True: the trace also has libtorch's operators and autograd's functions. The flag --profile-operators turns this
  /// on.
  bool operators = false;
};
MUSTER_API void to_json(Json& json, const ProfileConfig& options);
MUSTER_API void from_json(const Json& json, ProfileConfig& options);

struct RunConfig {
  /// The run's folder is storage_path/name, on a file system that all nodes share. By default, storage_path is ./runs,
  /// and name is PROGRAM_JOB in a Slurm job and PROGRAM_TIME elsewhere. The flags --name and --storage override these.
  /// --name names the run of a program's first trainer; the other trainers' runs are NAME_2, NAME_3, ..., in the order
  /// in which they begin. A trainer whose own `name` is NAME keeps it.
  std::string name = {};
  std::filesystem::path storage_path = {};
  CheckpointConfig checkpoint_config = {};
  FailureConfig failure_config = {};
  LoggingConfig logging_config = {};
  /// These callbacks receive the run's events on every worker; see muster/callback.hpp.
  std::vector<std::shared_ptr<Callback>> callbacks = {};
  /// True: the run writes files for TensorBoard to its folder (events.out.tfevents.*): every report's numbers, the
  /// values and pictures of Session::log_scalar and Session::log_image, and the training function's configuration.
  /// `tensorboard --logdir STORAGE` shows all runs of a storage. The flag --tensorboard turns it on. An Error
  /// (ExitCode::missing_package) if muster was built without protozero or libpng.
  bool tensorboard = false;
  /// With `tensorboard`, one report in this many also writes a histogram of each parameter of the prepared models, and
  /// of its averaged gradient; 0: none. Such a report reads all parameters.
  int histogram_interval = 0;
  ProfileConfig profile = {};
};
MUSTER_API void to_json(Json& json, const RunConfig& options);
MUSTER_API void from_json(const Json& json, RunConfig& options);

struct TorchConfig {
  /// See ProcessGroupOptions::backend; with use_gpu, "auto" is nccl if this build has it. The flag --backend overrides
  /// it.
  std::string backend = "auto";
  /// How long ranks wait for each other in any operation before the job ends (ExitCode::retry); --timeout overrides it.
  /// Empty: the launch's timeout.
  std::optional<std::chrono::milliseconds> timeout = {};
};
MUSTER_API void to_json(Json& json, const TorchConfig& options);
MUSTER_API void from_json(const Json& json, TorchConfig& options);

/// Names of datasets; {"train"} if none are given.
class DatasetNames {
 public:
  DatasetNames(std::vector<std::string> names) : names_(std::move(names)), given_(true) {}
  DatasetNames(std::initializer_list<std::string> names) : names_(names), given_(true) {}
  static DatasetNames not_given() {
    DatasetNames names{"train"};
    names.given_ = false;
    return names;
  }

  bool given() const noexcept { return given_; }
  const std::vector<std::string>& names() const noexcept { return names_; }
  bool operator==(const std::vector<std::string>& names) const { return names_ == names; }

 private:
  std::vector<std::string> names_;
  bool given_;
};

/// Which datasets are split among the workers. For fields that are not given, the trainer's default holds
/// (DataParallelTrainer::default_dataset_config).
struct DataConfig {
  /// The datasets that are split among the workers. Every other dataset is whole on each worker, so a metric that
  /// counts samples counts each of its samples once per worker.
  DatasetNames datasets_to_split = DatasetNames::not_given();
  /// True: all datasets are split. Empty: the trainer's default, which is false unless the trainer's class sets it.
  std::optional<bool> split_all = {};
};
MUSTER_API void to_json(Json& json, const DataConfig& options);
MUSTER_API void from_json(const Json& json, DataConfig& options);

}  // namespace muster
