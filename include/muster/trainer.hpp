// Trainers: they run a training function on every worker and return a Result.
//
//   muster::TorchTrainer trainer(launch, train, {.train_loop_config = {{"lr", 1e-3}},
//                                                .datasets = {{"train", "train.h5"}}});
//   const auto result = trainer.fit();
#pragma once

#include <muster/callback.hpp>
#include <muster/config.hpp>
#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
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

/// Sets up what a framework needs around a training function: environment variables, its own process group
/// (Session::set_process_group). Every method is called on every worker, and is collective unless training has failed.
/// For each validation, another Backend is started and shut down on the ranks that validate.
class MUSTER_API Backend {
 public:
  virtual ~Backend() = default;
  virtual void on_start(Session&) {}
  virtual void on_training_start(Session&) {}
  /// Called whenever on_start() has returned, even if something after it has thrown. If session.failed(), the other
  /// workers may be in any state: the call must then wait for no other rank, and an exception from it is a warning.
  virtual void on_shutdown(Session&) {}
};

/// Makes the backend of a trainer.
class MUSTER_API BackendConfig {
 public:
  virtual ~BackendConfig() = default;
  virtual std::unique_ptr<Backend> make_backend() const = 0;
  /// How long ranks wait for each other in everything that a trainer does, unless --timeout is given; empty: the
  /// default. The same on all ranks.
  virtual std::optional<std::chrono::milliseconds> timeout() const { return {}; }
};

/// Gives the workers a torch process group: over MPI, unless TorchConfig, the workers' GPUs or --backend require
/// another.
class MUSTER_API TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchConfig config) : config_(std::move(config)) {}
  void on_start(Session& session) override;
  void on_shutdown(Session& session) override;

 private:
  TorchConfig config_;
};

/// The training function, called on every worker: any callable that takes (Session&, const Config&) or (Session&). It
/// returns nothing, or a value that converts to JSON; rank 0's value is Result::return_value.
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

/// A trainer's options, the same on all ranks. They are saved in params.json, from which a run is restored, except for
/// those that are not data: backend_config, callbacks, datasets, preprocessor, resume_from_checkpoint, the validation
/// function.
struct TrainerOptions {
  Config train_loop_config = Config::object();
  /// Sets up a framework around the training function. Null: the trainer's own backend; only TorchTrainer has one.
  std::shared_ptr<const BackendConfig> backend_config = {};
  /// Options of TorchTrainer's backend. With a backend_config, or for a plain DataParallelTrainer, they would have no
  /// effect, so fit() refuses them (ExitCode::usage).
  TorchConfig torch_config = {};
  ScalingConfig scaling_config = {};
  DataConfig dataset_config = {};
  RunConfig run_config = {};
  std::map<std::string, Dataset> datasets = {};
  /// Fitted on "train" before training unless it is already fitted; applied to every dataset; saved with the
  /// checkpoints. A run that continues needs the same preprocessor again, and loads its saved fit. A run that starts
  /// from another run's checkpoint loads the fit from that checkpoint if its own preprocessor is not fitted.
  PreprocessorPtr preprocessor = {};
  /// The user's own JSON, kept with the run and its checkpoints.
  Json metadata = Json::object();
  /// The checkpoint from which a run without its own checkpoints starts. The run's reports and time still count from 0.
  std::optional<Checkpoint> resume_from_checkpoint = {};
  /// How a checkpoint is validated if its report asks for it; see muster/validation.hpp.
  ValidationConfig validation = {};
};
MUSTER_API void to_json(Json& json, const TrainerOptions& options);
MUSTER_API void from_json(const Json& json, TrainerOptions& options);
// One struct for all trainers.
using DataParallelTrainerOptions = TrainerOptions;
using TorchTrainerOptions = TrainerOptions;

/// Makes a trainer for a launch, with the given settings, and fits it. A sweep calls this for each trial, with a launch
/// over the trial's ranks only. as_trainable() returns one; any function of yours can be one.
using Trainable = std::function<Result(Launch& launch, const Config& config)>;

/// Runs one function on every worker, each with its share of the data.
class MUSTER_API DataParallelTrainer {
 public:
  DataParallelTrainer(Launch& launch, TrainLoop train_loop, TrainerOptions options = {});
  virtual ~DataParallelTrainer() = default;

  /// Trains; collective over all ranks of the launch. An error in training is in the Result; errors before training
  /// (bad flags, missing data, a folder in use) are thrown, the same on all ranks. A second call continues the same run
  /// if the run has a name. Another trainer has another run (see RunConfig::name).
  Result fit();
  /// Called by fit() before anything else, on every rank. It may change options_, but alike on all ranks.
  virtual void setup() {}

  /// default_dataset_config() of this kind of trainer, overridden by the options. A list of names in the options
  /// replaces both the list and split_all of the default.
  DataConfig get_dataset_config() const;

  /// Makes a Trainable of this trainer, for a sweep (muster/sweep.hpp). The settings of a trial override
  /// train_loop_config, as a configuration file does; an unknown setting is an Error (ExitCode::usage). Then fit() is
  /// called, including setup(), and launch() is the trial's. All trials have the same other options, except that name
  /// and storage_path of run_config are the sweep's. The trainer must outlive the sweep.
  Trainable as_trainable();

  /// True if restore(path) will find a run: a folder with params.json and at least one complete checkpoint, or one that
  /// may still lie in its fast tier. An Error (ExitCode::retry) if that cannot be read.
  static bool can_restore(const std::filesystem::path& path);

 protected:
  /// The backend of fit(); null: none.
  virtual std::shared_ptr<const BackendConfig> backend_config() const;
  /// Which datasets this kind of trainer splits where its options do not say; {"train"} if not overridden.
  virtual DataConfig default_dataset_config() const { return {}; }
  Launch& launch() const noexcept { return *launch_; }

  TrainLoop train_loop_;
  TrainerOptions options_;

 private:
  Launch* launch_;  ///< the trial's launch while fit() is called for a trial
  int number_ = 0;  ///< this trainer's number in launch_; 0 before fit()
};

/// For a restore() of your own trainer class: the saved options of the run in `path`, with which it continues. Fields
/// of `given` that differ from their defaults override them. Options that are not data (see TrainerOptions) must be
/// given again. An Error (ExitCode::data) if can_restore() is false.
MUSTER_API TrainerOptions restored_options(const std::filesystem::path& path, TrainerOptions given = {});

/// A DataParallelTrainer for torch: the workers share a process group, and so can use session.prepare_model().
class MUSTER_API TorchTrainer : public DataParallelTrainer {
 public:
  using DataParallelTrainer::DataParallelTrainer;

  /// Returns a trainer that continues the run in `path` with the options saved there, overridden by the fields of
  /// `options` that differ from their defaults. Options that are not data (see TrainerOptions) must be given again. An
  /// Error (ExitCode::usage) if --storage and --name give another folder.
  static TorchTrainer restore(Launch& launch, const std::filesystem::path& path, TrainLoop train_loop,
                              TrainerOptions options = {});

 protected:
  std::shared_ptr<const BackendConfig> backend_config() const override;
};

}  // namespace muster
