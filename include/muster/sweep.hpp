// A sweep: many trials of one training with different settings, side by side on groups of the launch's ranks.
//
//   muster::TorchTrainer trainer(launch, train, {.train_loop_config = {{"lr", 1e-3}, {"width", 64}}, …});
//   const auto sweep = muster::Sweep(launch, trainer.as_trainable(), {
//       .space = {{"lr", muster::log_uniform(1e-4, 1e-1)}, {"width", muster::grid({32, 64})}},
//       .num_samples = 8, .ranks_per_trial = 2, .metric = "val_loss", .mode = muster::ScoreOrder::min,
//       .scheduler = muster::asha({.max_t = 27})}).fit();
//   if (const auto best = sweep.best(); best && launch.rank() == 0) std::cout << best->config << "\n";
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
#include <muster/detail/export.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>
#include <muster/launch.hpp>
#include <muster/trainer.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster {

/// The values of one setting over the trials. Impossible bounds, empty lists, and values that JSON does not have (NaN
/// and infinity) are an Error (ExitCode::usage).
class MUSTER_API Domain {
 public:
  enum class Kind { grid, choice, uniform, log_uniform, randint };

  Domain(Kind kind, std::vector<Json> values);

  Kind kind() const noexcept { return kind_; }
  /// The values to choose from, or the two bounds.
  const std::vector<Json>& values() const noexcept { return values_; }

 private:
  Kind kind_;
  std::vector<Json> values_;
};

/// Each of the values: every sample of the space has a trial with each value.
MUSTER_API Domain grid(std::vector<Json> values);
/// One of the values, all equally likely.
MUSTER_API Domain choice(std::vector<Json> values);
/// A number from `low` up to `high`, uniformly distributed.
MUSTER_API Domain uniform(double low, double high);
/// The same, uniform in its logarithm; `low` must be above 0.
MUSTER_API Domain log_uniform(double low, double high);
/// A whole number from `low` to below `high`.
MUSTER_API Domain randint(std::int64_t low, std::int64_t high);

/// Settings by name; "optimizer.lr" is the setting lr inside of optimizer.
using Space = std::vector<std::pair<std::string, Domain>>;

/// Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2018) with
/// early stopping. Trials are compared at their reports number grace_period, grace_period · reduction_factor, …
/// (training_iteration). Of the trials that have reached a report so far, the best 1 / reduction_factor (rounded up) go
/// on; the others end there. No trial waits for another one, so the first one at a report always goes on.
struct Asha {
  std::int64_t grace_period = 1;
  int reduction_factor = 4;
  /// The report at which every trial ends as done.
  std::int64_t max_t = 100;
};
inline Asha asha(const Asha& options = {}) { return options; }

struct SweepOptions {
  Space space = {};
  /// How often the space is sampled. A sample has one trial for every combination of the grids; the last grid changes
  /// first. Random settings are drawn anew for each trial, from --seed and the trial's number. The trials of a sample
  /// train with the same seed: --seed plus the sample's number. More than 1,000,000 trials are an Error
  /// (ExitCode::usage).
  int num_samples = 1;
  /// Neighbouring ranks that train together; the launch's remaining ranks wait.
  int ranks_per_trial = 1;
  /// The metric, of reports or of their validations, by which trials are compared; the last value that each trial has
  /// reported counts. If the first trial that is done has not reported the metric, or has reported a value that is not
  /// a number, the sweep ends with an Error (ExitCode::usage). The same Error comes at the end of the sweep if the
  /// value is NaN in all trials. Your own Trainable may also add the metric to Result::metrics.
  std::string metric = {};
  /// Whether a larger or a smaller value is better. Required with a metric.
  std::optional<ScoreOrder> mode = {};
  /// Ends trials early; empty: no trial ends early.
  std::optional<Asha> scheduler = {};
  /// As in RunConfig: the sweep's folder is storage_path/name. The flags --name and --storage override these.
  std::string name = {};
  std::filesystem::path storage_path = {};
};

enum class TrialStatus {
  waiting,  ///< not begun, stopped on request or interrupted; continued when the sweep is started again
  running,  ///< only in sweep.json; a SweepResult has no running trials
  done,
  stopped,  ///< ended early by the scheduler; counts as ended well
  failed,   ///< tried again when the sweep is started again
};

struct Trial {
  std::string name = {};                      ///< such as trial_00003
  Config config = {};                         ///< the trial's settings, drawn from the space
  TrialStatus status = TrialStatus::waiting;  ///< also `failed` if it lost ranks in several starts without progress
  /// The metrics of its last report that has SweepOptions::metric, or else of its last report; null if there was none.
  Json metrics = {};
  /// The newest intact checkpoint of its run; empty if there is none.
  std::optional<Checkpoint> checkpoint = {};
  /// STORAGE/SWEEP/trial_00003, the folder of its run.
  std::filesystem::path path = {};
  /// Why the trial has failed. Ranks in the text are numbered within the trial.
  std::optional<Error> error = {};
};

/// The result of Sweep::fit(), the same on every rank.
struct MUSTER_API SweepResult {
  std::vector<Trial> trials = {};  ///< in the order of their numbers
  std::filesystem::path path = {};
  std::string metric = {};
  ScoreOrder mode = ScoreOrder::max;
  /// Why the sweep ended early, or the first trial's error if no trial ended well.
  std::optional<Error> error = {};

  /// The trial with the best metric of those that ended well; empty if none of them has the metric.
  std::optional<Trial> best() const;
  /// The code of `error`; Launch::run() returns it to main.
  ExitCode exit_code() const noexcept { return error ? error->code() : ExitCode::done; }
};

/// Divides the ranks into groups; each group takes the next trial as soon as it is free. A trial is a run of its own in
/// the sweep's folder, with its own launch: an exception ends only that trial, and is shown in the table. A lost rank
/// ends the job.
///
/// If a sweep is started again under its name, by `muster run` or by hand, it keeps the trials that ended well,
/// continues the others from their newest checkpoints, and runs the rest. Without --seed it keeps its seed. The space,
/// the scheduler, a given --seed and the settings that all trials share (the trainer's train_loop_config, --config,
/// --set) must be the same, and num_samples must not be smaller; otherwise an Error (ExitCode::usage) names the first
/// difference. The metric and the mode must be the same, too, once the scheduler has compared trials. For other
/// Trainables, such as an operator's, only --config and --set are compared. Requests to stop (signals, the file `stop`
/// in the sweep's folder, --time-limit) stop all trials, and each saves its state. A start can run any number of
/// trials, since trials reuse the MPI communicators of earlier ones.
///
/// The folder has sweep.json and sweep.csv, with a row per trial, and a folder for each trial. A run of the same name
/// may follow, for example with the best settings; its files lie beside these.
class MUSTER_API Sweep {
 public:
  /// All ranks must give the same options. MPI must allow calls by several threads (MPI_THREAD_MULTIPLE).
  Sweep(Launch& launch, Trainable trainable, SweepOptions options);

  /// Collective over all ranks of the launch. Throws an Error (ExitCode::usage) for invalid options. Rank 0 prints the
  /// table at the end, unless --progress is none.
  SweepResult fit();

 private:
  Launch& launch_;
  Trainable trainable_;
  SweepOptions options_;
};

}  // namespace muster
