// Trainers: they run a training function on every worker and return a Result.
#pragma once

#include <muster/config.hpp>
#include <muster/dataset.hpp>
#include <muster/launch.hpp>
#include <muster/preprocessor.hpp>
#include <muster/result.hpp>
#include <muster/session.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

namespace muster {

namespace detail::train {
class Run;
}

/// Sets up what a framework needs around a training function. Every call is made on every worker, and is collective.
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

/// Knows the backends of the process group.
class TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchConfig config) : config_(std::move(config)) {}
  void on_start(Session& session) override;
  void on_shutdown(Session& session) override;

 private:
  TorchConfig config_;
};

/// Called on every worker; what it returns is discarded.
using TrainLoop = std::function<void(Session&, const Config&)>;

struct DataParallelTrainerOptions {
  Config train_loop_config = Config::object();
  std::shared_ptr<const BackendConfig> backend_config = {};
  ScalingConfig scaling_config = {};
  DataConfig dataset_config = {};
  RunConfig run_config = {};
  std::map<std::string, Dataset> datasets = {};
  /// Fitted on "train" before training unless it is fitted already, applied to every dataset, saved with the
  /// checkpoints.
  PreprocessorPtr preprocessor = {};
  /// The user's own JSON, kept with the run and its checkpoints.
  Json metadata = Json::object();
  std::optional<Checkpoint> resume_from_checkpoint = {};
};

/// Runs one function on every worker, each with its share of the data.
class DataParallelTrainer {
 public:
  DataParallelTrainer(Launch& launch, TrainLoop train_loop, DataParallelTrainerOptions options = {});
  virtual ~DataParallelTrainer() = default;

  /// Trains; collective over all ranks of the launch. An error of training is in the Result; errors before it (bad
  /// flags, missing data, a directory in use) are thrown, the same on all ranks.
  Result fit();
  /// The first thing that fit() does, on every rank. It may change options_, on all ranks alike.
  virtual void setup() {}

  const DataConfig& get_dataset_config() const noexcept { return options_.dataset_config; }

  /// Whether restore(path) finds a run: a directory with params.json and at least one whole checkpoint. An Error
  /// (ExitCode::retry) if that cannot be read.
  static bool can_restore(const std::filesystem::path& path);

 protected:
  Launch& launch_;
  TrainLoop train_loop_;
  DataParallelTrainerOptions options_;

 private:
  Result train(const detail::train::Run& run, int workers);
};

struct TorchTrainerOptions {
  Config train_loop_config = Config::object();
  TorchConfig torch_config = {};
  ScalingConfig scaling_config = {};
  DataConfig dataset_config = {};
  RunConfig run_config = {};
  std::map<std::string, Dataset> datasets = {};
  PreprocessorPtr preprocessor = {};
  Json metadata = Json::object();
  std::optional<Checkpoint> resume_from_checkpoint = {};
};

/// A DataParallelTrainer for torch: the workers share a process group, session.prepare_model makes models parallel.
class TorchTrainer : public DataParallelTrainer {
 public:
  /// `train_loop` is any callable void(Session&) or void(Session&, const Config&).
  template <class Function>
  TorchTrainer(Launch& launch, Function train_loop, TorchTrainerOptions options = {})
      : TorchTrainer(launch, wrap(std::move(train_loop)), std::move(options), 0) {}

  /// A trainer that continues the run in `path` with the configuration saved there (train_loop_config, scaling, run,
  /// torch and dataset configurations, metadata); what `options` sets to other than its default wins. Datasets,
  /// preprocessors, callbacks and functions cannot be saved and are given again.
  template <class Function>
  static TorchTrainer restore(Launch& launch, const std::filesystem::path& path, Function train_loop,
                              TorchTrainerOptions options = {}) {
    return TorchTrainer(launch, wrap(std::move(train_loop)), restored(path, std::move(options)), 0);
  }

 private:
  TorchTrainer(Launch& launch, TrainLoop train_loop, TorchTrainerOptions options, int);
  static TorchTrainerOptions restored(const std::filesystem::path& path, TorchTrainerOptions options);

  template <class Function>
  static TrainLoop wrap(Function function) {
    if constexpr (std::is_invocable_v<Function&, Session&, const Config&>)
      return function;
    else
      return [function = std::move(function)](Session& session, const Config&) mutable { function(session); };
  }
};

}  // namespace muster
