// The options of a run: structs with a default for every field, set by designated initialisers. C++ wants these in the
// order of the fields: {.num_workers = 2, .use_gpu = true} compiles, the other way round it does not.
#pragma once

#include <muster/json.hpp>

#include <chrono>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

class Callback;

/// What a training function is given: set by program, file (--config) and flags (--set key=value), saved with the run.
using Config = Json;

/// How many ranks train: `4`, or as many as there are of `{2, 4}`, from 2 to 4; all of the launch unless given.
class NumWorkers {
 public:
  NumWorkers() = default;
  NumWorkers(int count) : least_(count), most_(count) {}
  NumWorkers(std::optional<int> count) : least_(count), most_(count) {}
  NumWorkers(int least, int most) : least_(least), most_(most) {}

  /// Empty for all.
  std::optional<int> least() const noexcept { return least_; }
  std::optional<int> most() const noexcept { return most_; }
  bool is_range() const noexcept { return least_ != most_; }
  bool operator==(const NumWorkers&) const = default;

 private:
  std::optional<int> least_ = {}, most_ = {};
};

struct ScalingConfig {
  /// More than there are ranks is an error; what is left over validates checkpoints (TrainerOptions::validation) or
  /// waits in fit(), and gets the same Result. {least, most} takes as many as there are, and `muster run` then starts
  /// the program with fewer where not all can be had, as with --min-workers, which wins; a step keeps its number of
  /// samples.
  NumWorkers num_workers = {};
  /// Train on cuda:local_rank. An error where there is no GPU.
  bool use_gpu = false;
  /// Threads of torch per rank; the launch's choice unless given.
  std::optional<int> threads_per_worker = {};
  /// The same weights, bit for bit, at any number of workers that divides this one, also when it changes from one start
  /// to the next: a step has so many micro-batches, and each worker takes several of them, one after the other.
  /// Gradients are summed in the order of micro-batches, to which random state and batch statistics belong. The
  /// training function stays as it is: until the last batch of a step, gradients are put aside after backward(), so
  /// that zero_grad() and the optimizer's step() find none, and EMA::update() and GradScaler::update() change nothing.
  /// What an earlier step has left in .grad comes back at the end of the step, added to its average; if the step is
  /// left before that, the next backward() is an Error. A schedule cannot know: step it where session.step_complete()
  /// is true, and so whatever else belongs to a step. Each batch has one backward(). `batch_size` is that of a
  /// micro-batch. With the same library and threads per worker.
  std::optional<int> virtual_workers = {};
};
void to_json(Json& json, const ScalingConfig& options);
void from_json(const Json& json, ScalingConfig& options);

enum class ScoreOrder { max, min };

/// What a report with a state does that finds the last save still being written.
enum class WhenBusy {
  wait,  ///< for its end
  drop,  ///< it goes on without a checkpoint: its row has no checkpoint_dir_name
};

struct CheckpointConfig {
  /// How many checkpoints stay on disk; all unless given. The newest always stays, beside the best if it is not one.
  std::optional<int> num_to_keep = {};
  /// The reported metric by which the best are kept; the newest are kept where it is empty.
  std::string checkpoint_score_attribute = {};
  ScoreOrder checkpoint_score_order = ScoreOrder::max;
  /// A report with a state returns when all that is to be saved has been copied, and while training goes on a thread of
  /// each rank writes it; one save at a time. The copy takes memory: on each rank as much as it writes, which is a
  /// share of what the ranks have alike and all that is its own. With a fused optimizer (prepare_optimizer) nothing of
  /// its parameters and state is copied: the next step leaves the old values where they are and puts the new ones into
  /// other memory, so that its node holds them twice from the start on (where /dev/shm has no room for that, they are
  /// copied); which of the two a parameter lies in changes with each save.
  ///
  /// The ranks' states are compared, and your own files copied, before the report returns. An error of the writing is
  /// thrown by the first report that finds it ended, in place of all that it does else, or at the end of training; on
  /// every rank, the same. Nothing ends before the last save has been written, for which a time limit leaves time, and
  /// a stop on request saves while it waits. What is being written when the job is killed is lost, and its row of
  /// result.json goes with it when the run is taken up again.
  bool async_save = false;
  WhenBusy when_busy = WhenBusy::wait;
  /// A folder on each node's own disk or in its memory, such as /dev/shm. A checkpoint is first written and made
  /// durable there, each node's share on that node; then it is copied to the run's folder, behind training, and
  /// removed. That is one save at a time too: when_busy says what a report does meanwhile. What could not be copied
  /// stays there until the next one is whole, so that there is room for two at most. A run that is taken up again
  /// finishes a copy that was cut off, if the nodes that have the shares are there again; else it goes on, with a
  /// warning, from the run's folder, the only place where Result looks. Empty: none.
  std::filesystem::path fast_tier = {};
};
void to_json(Json& json, const CheckpointConfig& options);
void from_json(const Json& json, CheckpointConfig& options);

/// What becomes of a step of an optimizer for which an averaged gradient is NaN or infinite. It is found before the
/// step in all prepared optimizers (Session::prepare_optimizer), whose step is taken or left out on all workers alike;
/// a model with another optimizer is an Error (ExitCode::usage) then, as is LBFGS. A loss that is NaN is found by the
/// gradients that it makes, so it is not looked at itself; one that is infinite, with gradients that are finite, does
/// no harm to the weights. A GradScaler looks first, and leaves out by its own rule what it finds.
///
/// The look is part of the averaging or the clipping where an optimizer is fused; else it reads the averages once.
enum class BadNumbers {
  /// Nothing is looked at.
  ignore,
  /// An Error (ExitCode::user_error) that names the step, the parameter and, as far as it can be known, the rank. The
  /// weights of a fused optimizer may have been written by then; the checkpoints are those of before.
  stop,
  /// The step is left out: weights and the optimizer's state stay as they are, and the loop goes on. A report warns of
  /// how many there were. What the forward pass has changed stays changed, such as statistics of batch-norm. With a
  /// fused optimizer and no max_grad_norm this reads all gradients once more.
  skip,
  /// The training function begins again from the newest checkpoint, as after a failure that does not count. It meets
  /// the same batches; when it comes to the step that was bad, that step is left out. A process that is started anew
  /// does not know of it and goes back once more.
  roll_back,
};

struct FailureConfig {
  /// Failures without progress after which training goes on from the newest checkpoint: 0 none, -1 no limit. A failure
  /// counts as the first one again if the newest checkpoint is of a later batch or epoch than at any failure before. If
  /// muster counts no batches, a later report that saves another state counts too. Errors that all ranks know of are
  /// tried again inside the job: at once, then after 1, 2, 4 … s, at most a minute. Errors of usage (64) and of data
  /// (65) are not. After a lost or stuck rank (ExitCode::retry) `muster run` starts the job again. What lives outside
  /// of the training function stays as the failed attempt has left it, if no State restores it: make optimizers and
  /// schedulers inside.
  int max_failures = 0;
  /// The same for ends that are not the program's fault, which `muster run` counts apart: a node that is lost, or
  /// SIGTERM to ranks that do not know it, as where a scheduler takes the place for others.
  int max_preemption_failures = -1;
  BadNumbers bad_numbers = BadNumbers::ignore;
  /// Steps in a row that may be left out (skip), or times that the run may go back to one checkpoint (roll_back); one
  /// more is an Error as of BadNumbers::stop. -1 no limit.
  int bad_numbers_limit = 10;
};
void to_json(Json& json, const FailureConfig& options);
void from_json(const Json& json, FailureConfig& options);

/// What is said of a run.
struct LoggingConfig {
  /// trace, debug, info, warn, error or off; info unless given. The flag --log-level wins.
  std::string level = {};
  /// Also in the run's folder, as logs/rank_00000.log.
  bool file = true;
  /// A file for each rank; else rank 0's alone.
  bool per_rank = true;
};
void to_json(Json& json, const LoggingConfig& options);
void from_json(const Json& json, LoggingConfig& options);

struct RunConfig {
  /// The run lies under storage_path/name, on a file system that all nodes share; storage_path is ./runs unless given.
  /// The flags --name and --storage win. --name names the run of the first trainer of a program; those of the others
  /// are NAME_2, NAME_3, ..., in the order in which they begin. A trainer whose own `name` is NAME keeps it.
  std::string name = {};
  std::filesystem::path storage_path = {};
  CheckpointConfig checkpoint_config = {};
  FailureConfig failure_config = {};
  LoggingConfig logging_config = {};
  /// Told of the run as it goes, on every worker; see muster/callback.hpp.
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};
void to_json(Json& json, const RunConfig& options);
void from_json(const Json& json, RunConfig& options);

struct TorchConfig {
  /// As ProcessGroupOptions::backend; with use_gpu "auto" is nccl where this build has it. The flag --backend wins.
  std::string backend = "auto";
  /// How long ranks wait for each other in anything before the job ends (ExitCode::retry); --timeout wins.
  std::optional<std::chrono::milliseconds> timeout = {};
};
void to_json(Json& json, const TorchConfig& options);
void from_json(const Json& json, TorchConfig& options);

/// Names of datasets, {"train"} where none are given.
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

/// What is not given is the trainer's default (DataParallelTrainer::default_dataset_config).
struct DataConfig {
  /// The datasets that are split among the workers; every other is whole on each, where a metric that counts samples
  /// counts each sample once per worker.
  DatasetNames datasets_to_split = DatasetNames::not_given();
  /// Split them all; false unless given.
  std::optional<bool> split_all = {};
};
void to_json(Json& json, const DataConfig& options);
void from_json(const Json& json, DataConfig& options);

}  // namespace muster
