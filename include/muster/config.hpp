// The options of a run: structs with a default for every field, set by designated initialisers.
#pragma once

#include <muster/json.hpp>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster {

/// What a training function is given: set by program, file (--config) and flags (--set key=value), saved with the run.
using Config = Json;

struct ScalingConfig {
  /// Ranks that train; all unless given, more is an error. What is left over waits in fit() and gets the same Result.
  std::optional<int> num_workers = {};
  /// Train on cuda:local_rank. An error where there is no GPU.
  bool use_gpu = false;
  /// Threads of torch per rank; the launch's choice unless given.
  std::optional<int> threads_per_worker = {};
  /// The same weights, bit for bit, at any number of workers that divides this one, also when it changes from one start
  /// to the next: a step has so many micro-batches, and each worker takes several of them, one after the other.
  /// Gradients are summed in the order of micro-batches, to which random state and batch statistics belong. The
  /// training function stays as it is: until the last batch of a step, gradients are put aside after backward(), so
  /// that zero_grad() and the optimizer's step() find none. Each batch has one backward(). `batch_size` is that of a
  /// micro-batch. With the same library and threads per worker.
  std::optional<int> virtual_workers = {};
};
void to_json(Json& json, const ScalingConfig& options);
void from_json(const Json& json, ScalingConfig& options);

enum class ScoreOrder { max, min };

struct CheckpointConfig {
  /// How many checkpoints stay on disk; all unless given. The newest always stays, beside the best if it is not one.
  std::optional<int> num_to_keep = {};
  /// The reported metric by which the best are kept; the newest are kept where it is empty.
  std::string checkpoint_score_attribute = {};
  ScoreOrder checkpoint_score_order = ScoreOrder::max;
};
void to_json(Json& json, const CheckpointConfig& options);
void from_json(const Json& json, CheckpointConfig& options);

struct FailureConfig {
  /// Failures since the last new checkpoint after which training goes on from it: 0 none, -1 no limit. Errors that all
  /// ranks know of are tried again inside the job; after a lost or stuck rank (ExitCode::retry) `muster run` does it.
  int max_failures = 0;
};
void to_json(Json& json, const FailureConfig& options);
void from_json(const Json& json, FailureConfig& options);

/// Told of a run as it goes, on every worker. Users derive their own.
class Callback {
 public:
  virtual ~Callback() = default;
  /// After a report: its row as in result.json, the same on all workers.
  virtual void on_report(const Json& row) = 0;
};

struct RunConfig {
  /// The run lies under storage_path/name, on a file system that all nodes share. The flags --name and --storage win.
  std::string name = {};
  std::filesystem::path storage_path = {};
  CheckpointConfig checkpoint_config = {};
  FailureConfig failure_config = {};
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};
void to_json(Json& json, const RunConfig& options);
void from_json(const Json& json, RunConfig& options);

struct TorchConfig {
  /// As ProcessGroupOptions::backend; with use_gpu "auto" is nccl where this build has it. The flag --backend wins.
  std::string backend = "auto";
  /// How long ranks wait for each other: gradients, reports, saves, process groups. The flag --timeout wins.
  std::optional<std::chrono::milliseconds> timeout = {};
};
void to_json(Json& json, const TorchConfig& options);
void from_json(const Json& json, TorchConfig& options);

struct DataConfig {
  /// The datasets that are split among the workers; every other is whole on each.
  std::vector<std::string> datasets_to_split = {"train"};
  /// Split them all.
  bool split_all = false;
};
void to_json(Json& json, const DataConfig& options);
void from_json(const Json& json, DataConfig& options);

}  // namespace muster
