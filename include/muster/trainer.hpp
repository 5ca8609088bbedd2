// Trainers: they run a training function on every worker and return a Result.
//
//   muster::TorchTrainer trainer(launch, train, {.train_loop_config = {{"lr", 1e-3}},
//                                                .datasets = {{"train", "train.h5"}}});
//   const auto result = trainer.fit();
#pragma once

#include <muster/callback.hpp>
#include <muster/config.hpp>
#include <muster/dataset.hpp>
#include <muster/json.hpp>
#include <muster/launch.hpp>
#include <muster/preprocessor.hpp>
#include <muster/result.hpp>
#include <muster/session.hpp>
#include <muster/validation.hpp>

#include <chrono>
#include <concepts>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace muster {

/// Sets up what a framework needs around a training function: environment variables, a process group of its own
/// (Session::set_process_group). Every call is made on every worker, and is collective.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void on_start(Session&) {}
  virtual void on_training_start(Session&) {}
  /// Wherever on_start() has returned, also when what came after it has thrown. Where session.failed() says so, the
  /// other workers may be anywhere: the call then waits for nobody, and what it throws is a warning.
  virtual void on_shutdown(Session&) {}
};

/// Names the backend of a trainer.
class BackendConfig {
 public:
  virtual ~BackendConfig() = default;
  virtual std::unique_ptr<Backend> make_backend() const = 0;
  /// How long ranks wait for each other in everything that a trainer does, unless --timeout is given; the default if
  /// none. The same on all ranks.
  virtual std::optional<std::chrono::milliseconds> timeout() const { return {}; }
};

/// Gives the workers a torch process group, over MPI unless TorchConfig, the devices or --backend say otherwise.
class TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchConfig config) : config_(std::move(config)) {}
  void on_start(Session& session) override;
  void on_shutdown(Session& session) override;

 private:
  TorchConfig config_;
};

/// The training function, called on every worker: any callable of (Session&, const Config&) or (Session&). It returns
/// nothing, or what becomes JSON: rank 0's is Result::return_value.
class TrainLoop {
 public:
  template <class Function>
  requires(std::invocable<Function&, Session&, const Config&> && !std::same_as<Function, TrainLoop>)
      TrainLoop(Function loop)
      : loop_([loop = std::move(loop)](Session& session, const Config& config) mutable {
          return as_json([&]() -> decltype(auto) { return loop(session, config); });
        }) {}
  template <class Function>
  requires(std::invocable<Function&, Session&> && !std::invocable<Function&, Session&, const Config&>)
      TrainLoop(Function loop)
      : loop_([loop = std::move(loop)](Session& session, const Config&) mutable {
          return as_json([&]() -> decltype(auto) { return loop(session); });
        }) {}

  Json operator()(Session& session, const Config& config) const { return loop_(session, config); }

 private:
  template <class Call>
  static Json as_json(const Call& call) {
    using Returned = std::invoke_result_t<const Call&>;
    static_assert(std::is_void_v<Returned> || std::convertible_to<Returned, Json>,
                  "a training function returns nothing, or what becomes JSON");
    if constexpr (std::is_void_v<Returned>)
      return call(), Json();
    else
      return call();
  }

  std::function<Json(Session&, const Config&)> loop_;
};

/// What a trainer is asked for, the same on all ranks. Kept in params.json, from which a run is restored, but for what
/// is not data: backend_config, callbacks, datasets, preprocessor, resume_from_checkpoint, the function that validates.
struct TrainerOptions {
  Config train_loop_config = Config::object();
  /// What sets up a framework around the training function; that of the trainer unless given, which only TorchTrainer
  /// has.
  std::shared_ptr<const BackendConfig> backend_config = {};
  /// Of the backend that TorchTrainer has. Beside a backend_config, or given to a plain DataParallelTrainer, it would
  /// have no effect: fit() refuses it (ExitCode::usage).
  TorchConfig torch_config = {};
  ScalingConfig scaling_config = {};
  DataConfig dataset_config = {};
  RunConfig run_config = {};
  std::map<std::string, Dataset> datasets = {};
  /// Fitted on "train" before training unless it is fitted already, applied to every dataset, saved with the
  /// checkpoints. A run that goes on takes up what it has saved of it, and needs the same one again; one that starts
  /// from another run's checkpoint takes that up where its own is not fitted.
  PreprocessorPtr preprocessor = {};
  /// The user's own JSON, kept with the run and its checkpoints.
  Json metadata = Json::object();
  /// What a run that has no checkpoint of its own starts from. Its reports and its time count from 0 all the same.
  std::optional<Checkpoint> resume_from_checkpoint = {};
  /// What validates the checkpoints for which a report asks that; see muster/validation.hpp.
  ValidationConfig validation = {};
};
void to_json(Json& json, const TrainerOptions& options);
void from_json(const Json& json, TrainerOptions& options);
// One struct for all trainers.
using DataParallelTrainerOptions = TrainerOptions;
using TorchTrainerOptions = TrainerOptions;

/// Makes a trainer for a launch, with settings of its own, and fits it: what a sweep does for each trial, on the ranks
/// of that launch, which are a part of all. as_trainable() gives one, and so may any function of the user's.
using Trainable = std::function<Result(Launch& launch, const Config& config)>;

/// Runs one function on every worker, each with its share of the data.
class DataParallelTrainer {
 public:
  DataParallelTrainer(Launch& launch, TrainLoop train_loop, TrainerOptions options = {});
  virtual ~DataParallelTrainer() = default;

  /// Trains; collective over all ranks of the launch. An error of training is in the Result; errors before it (bad
  /// flags, missing data, a directory in use) are thrown, the same on all ranks. Called again, it goes on with the same
  /// run where the run has a name; another trainer has a run of its own (see RunConfig::name).
  Result fit();
  /// The first thing that fit() does, on every rank. It may change options_, on all ranks alike.
  virtual void setup() {}

  /// The default of this kind of trainer with what the options give laid over it: a list of names takes the place of
  /// the default's list and of its split_all.
  DataConfig get_dataset_config() const;

  /// This trainer for a sweep (muster/sweep.hpp): the settings of a trial are laid over train_loop_config, as those of
  /// a file are, where an unknown one is an Error (ExitCode::usage), and fit() is called, setup() included, with
  /// launch() being the trial's. Other options are alike in all trials; of run_config name and storage_path are the
  /// sweep's. The trainer outlives the sweep.
  Trainable as_trainable();

  /// Whether restore(path) finds a run: a directory with params.json and at least one whole checkpoint, or one that
  /// may still lie in its fast tier. An Error (ExitCode::retry) if that cannot be read.
  static bool can_restore(const std::filesystem::path& path);

 protected:
  /// The backend of fit(); null for none.
  virtual std::shared_ptr<const BackendConfig> backend_config() const;
  /// Which datasets this kind of trainer splits where its options do not say.
  virtual DataConfig default_dataset_config() const { return {}; }
  Launch& launch() const noexcept { return *launch_; }

  TrainLoop train_loop_;
  TrainerOptions options_;

 private:
  Launch* launch_;  ///< that of a trial while fit() is called for one
  int number_ = 0;  ///< among the trainers of launch_; 0 before fit()
};

/// For a trainer's own restore(): the options of the run in `path`, as they were saved, under which it goes on. What
/// `given` sets to other than its default wins; what is not data (see TrainerOptions) is given again. An Error
/// (ExitCode::data) where can_restore() says no.
TrainerOptions restored_options(const std::filesystem::path& path, TrainerOptions given = {});

/// A DataParallelTrainer for torch: the workers share a process group, session.prepare_model makes models parallel.
class TorchTrainer : public DataParallelTrainer {
 public:
  using DataParallelTrainer::DataParallelTrainer;

  /// A trainer that continues the run in `path` with the options saved there; what `options` sets to other than its
  /// default wins. What is not data (see TrainerOptions) is given again. An Error (ExitCode::usage) if --storage and
  /// --name say another folder.
  static TorchTrainer restore(Launch& launch, const std::filesystem::path& path, TrainLoop train_loop,
                              TrainerOptions options = {});

 protected:
  std::shared_ptr<const BackendConfig> backend_config() const override;
};

}  // namespace muster
