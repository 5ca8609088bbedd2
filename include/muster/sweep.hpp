// A sweep: many trials of one training, each with settings of its own, side by side on groups of the launch's ranks.
//
//   muster::TorchTrainer trainer(launch, train, {.train_loop_config = {{"lr", 1e-3}, {"width", 64}}, …});
//   const auto sweep = muster::Sweep(launch, trainer.as_trainable(), {
//       .space = {{"lr", muster::log_uniform(1e-4, 1e-1)}, {"width", muster::grid({32, 64})}},
//       .num_samples = 8, .ranks_per_trial = 2, .metric = "val_loss", .mode = muster::ScoreOrder::min,
//       .scheduler = muster::asha({.max_t = 27})}).fit();
//   if (const auto best = sweep.best()) std::cout << best->config << "\n";
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/config.hpp>
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

/// How the trials get one setting. Bounds that cannot be, empty lists, and values that JSON does not know (NaN and
/// infinity) are an Error (ExitCode::usage).
class Domain {
 public:
  enum class Kind { grid, choice, uniform, log_uniform, randint };

  Domain(Kind kind, std::vector<Json> values);

  Kind kind() const noexcept { return kind_; }
  /// To choose from, or the two bounds.
  const std::vector<Json>& values() const noexcept { return values_; }

 private:
  Kind kind_;
  std::vector<Json> values_;
};

/// Each of the values, in as many trials as there are samples.
Domain grid(std::vector<Json> values);
/// One of the values, each as likely.
Domain choice(std::vector<Json> values);
/// A number from `low` up to `high`.
Domain uniform(double low, double high);
/// The same by its logarithm; `low` is more than 0.
Domain log_uniform(double low, double high);
/// A whole number from `low` on, below `high`.
Domain randint(std::int64_t low, std::int64_t high);

/// Settings by their names; "optimizer.lr" is the setting lr inside of optimizer.
using Space = std::vector<std::pair<std::string, Domain>>;

/// Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2018), by
/// stopping: trials are compared at their reports grace_period, grace_period · reduction_factor, …
/// (training_iteration). The first of `reduction_factor` parts of those that have come so far go on, rounded up; the
/// others end there. Nobody waits for a trial that has not come yet, so the first one at a report always goes on.
struct Asha {
  std::int64_t grace_period = 1;
  int reduction_factor = 4;
  /// The report with which every trial is done.
  std::int64_t max_t = 100;
};
inline Asha asha(const Asha& options = {}) { return options; }

struct SweepOptions {
  Space space = {};
  /// How often the space is sampled. A sample has a trial for every combination of the grids, in which the last grid
  /// changes first; what is random is drawn for each trial anew, from --seed and the trial's number. The trials of a
  /// sample train with the same seed: --seed plus the sample's number.
  int num_samples = 1;
  /// Neighbouring ranks that train together; what is left over of the launch waits.
  int ranks_per_trial = 1;
  /// A reported metric, by which trials are compared: that of their last reports.
  std::string metric = {};
  ScoreOrder mode = ScoreOrder::max;
  /// Ends trials early; none unless given.
  std::optional<Asha> scheduler = {};
  /// As RunConfig's: the sweep lies under storage_path/name. The flags --name and --storage win.
  std::string name = {};
  std::filesystem::path storage_path = {};
};

enum class TrialStatus {
  waiting,  ///< not begun, or stopped on request or cut off; the sweep goes on with it when it is started again
  running,  ///< in sweep.json, while it is
  done,
  stopped,  ///< by the scheduler, which is as good as done
  failed,   ///< tried again when the sweep is started again
};

struct Trial {
  std::string name = {};                      ///< trial_00003
  Config config = {};                         ///< what the space has given it
  TrialStatus status = TrialStatus::waiting;  ///< failed also where a rank of it was lost again and again
  /// Those of its last report; null if there was none.
  Json metrics = {};
  /// The last one committed.
  std::optional<Checkpoint> checkpoint = {};
  /// STORAGE/SWEEP/trial_00003, the folder of its run.
  std::filesystem::path path = {};
  /// Why it has failed. Ranks in it are those of the trial.
  std::optional<Error> error = {};
};

/// The same on every rank.
struct SweepResult {
  std::vector<Trial> trials = {};  ///< in their order
  std::filesystem::path path = {};
  std::string metric = {};
  ScoreOrder mode = ScoreOrder::max;
  /// Why the sweep has ended early, or the first trial's error where none has ended well.
  std::optional<Error> error = {};

  /// Of the trials that have ended well the one with the best metric; none if there is none that has it.
  std::optional<Trial> best() const;
  /// That of `error`; what Launch::run() gives main.
  ExitCode exit_code() const noexcept { return error ? error->code() : ExitCode::done; }
};

/// The world is cut into groups of ranks, and each takes the next trial as soon as it is free. A trial is a run with a
/// name of its own in the sweep's folder, and a world of its own: an exception ends it alone, with a line in the table.
/// A rank that is lost ends the job.
///
/// Started again under its name, by `muster run` or by hand, a sweep keeps the trials that have ended well, goes on
/// with the others from their newest checkpoints and begins the rest. The space, --seed and the settings that all
/// trials have alike (the trainer's train_loop_config, --config, --set) must be the same: else an Error
/// (ExitCode::usage) names the first that is not. Of another Trainable, such as an operator's, only --config and --set
/// are known. What asks a run to stop (signals, the file `stop` in the sweep's folder, --time-limit) stops all trials,
/// each with its state saved. A start has room for any number of trials: each uses the MPI communicators of the one
/// before again.
///
/// The folder has sweep.json and sweep.csv, a row per trial, and a folder for each. A run of the same name may follow,
/// with the best settings; it lies there beside them.
class Sweep {
 public:
  /// All ranks give the same options. MPI must allow calls by several threads (MPI_THREAD_MULTIPLE).
  Sweep(Launch& launch, Trainable trainable, SweepOptions options);

  /// Collective over all ranks of the launch; with options that cannot be, an Error (ExitCode::usage). Rank 0 prints
  /// the table at the end, unless --progress is none.
  SweepResult fit();

 private:
  Launch& launch_;
  Trainable trainable_;
  SweepOptions options_;
};

}  // namespace muster
