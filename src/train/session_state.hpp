// What stands behind a Session for one attempt of training.
#pragma once

#include "checkpoint/store.hpp"
#include "data/passes.hpp"
#include "data/shard.hpp"
#include "gradients/data_parallel.hpp"
#include "muster/launch.hpp"
#include "muster/preprocessor.hpp"
#include "muster/session.hpp"
#include "observe/sinks.hpp"
#include "train/random.hpp"
#include "train/run.hpp"
#include "train/stop.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster {
class Backend;
}

namespace muster::detail::train {

struct ProcessGroups;

struct SessionState {
  using Clock = std::chrono::steady_clock;

  // Given by the trainer.
  const Launch& launch;
  const Run& run;
  Communicator workers;  // for the training function's own use
  Communicator control;  // report and checkpoint
  ScalingConfig scaling;
  RunConfig config;
  Json metadata;
  at::Device device = at::kCPU;
  PreprocessorPtr preprocessor = {};
  std::map<std::string, Dataset> datasets;
  DataConfig data_config;
  step::StepShare share = {};

  checkpoint::Store store;
  observe::Sinks sinks;
  std::optional<Checkpoint> start = {};               // what the run goes on from
  std::optional<checkpoint::Restored> restored = {};  // its content, read when it is first needed
  std::optional<Checkpoint> newest = {};              // committed in this attempt, else `start`

  std::shared_ptr<Backend> backend = {};  // from its start to its shutdown
  bool failed = false;
  std::shared_ptr<ProcessGroups> groups = {};  // set by TorchBackend
  std::vector<std::shared_ptr<gradients::DataParallel>> models = {};
  std::shared_ptr<data::Passes> passes = std::make_shared<data::Passes>();
  std::shared_ptr<const data::Passes::Watch> watch = {};
  std::shared_ptr<int> no_sync_depth = std::make_shared<int>(0);
  std::map<std::string, std::shared_ptr<data::ShardState>> shards = {};

  // Where training stands.
  std::int64_t epoch = 0;
  std::int64_t epochs = 0;  // 0: not known
  std::int64_t training_iteration = 0;
  std::int64_t global_step = 0;
  std::int64_t samples_since_report = 0;
  double time_before = 0;  // seconds, of earlier jobs
  Clock::time_point begin = Clock::now();
  Clock::time_point last_report = Clock::now();
  bool checkpoint_taken = false;                   // by the training function, to load it by itself
  bool beginning_told = false;                     // whether there was need to say that something begins again
  bool epoch_set = false;                          // by a loop of the training function's own
  bool score_reported = false;                     // the metric by which the best checkpoints are kept
  bool score_missed = false;                       // and once it was not there
  std::optional<ShardGenerators> generators = {};  // with virtual workers

  StopWish stop = {};
  std::int64_t passes_heard = 0;  // of all models, at the last place
  Unspent unspent = {};
  int unsettled_places = 0;                       // one after the other, since the wish to stop is known
  std::weak_ptr<const StateEntries> living = {};  // of the State that was last restored or reported
  bool files_reported = false;                    // of the user's own
  bool stop_told = false;                         // to the training function
  bool stopped = false;                           // training has ended so

  bool root() const noexcept { return workers.rank() == 0; }

  /// The content of `start`. Collective at its first call.
  const checkpoint::Restored& read_start();
  /// The shard of that name, made at its first use.
  std::shared_ptr<data::ShardState> shard(const std::string& name);
  /// Warns, once, of what begins again although the run goes on. `saves`: a state is about to be reported.
  void tell_beginning(bool saves);
  /// Follows the training passes from now on.
  void watch_passes();
  /// The random state of this worker, or of all of its shards, for a checkpoint; and back.
  std::string save_random_state();
  void restore_random_state(const checkpoint::Restored& saved);

  /// Session::report; `entries` null without a state. Collective.
  void report(const Metrics& metrics, const StateEntries* entries, const std::optional<Checkpoint>& files,
              const ReportOptions& options);

  /// Loads what a checkpoint that no run has made holds for these entries; whether there was anything.
  bool restore_what_is_there(const StateEntries& entries);
  /// A place where all workers are alike, with no batch half used. Saves and throws if any has been asked to stop and
  /// nothing is left half done. Collective, now and then.
  void heed_stop();
  /// The training function has returned.
  void end_training();

  /// Where training stands, for a checkpoint, of a report or in between; and back.
  Json save_progress(bool in_report) const;
  void restore_progress(const checkpoint::TrainerState& progress);

 private:
  Json make_row(Json metrics) const;
  Checkpoint save(const StateEntries* entries, const std::optional<Checkpoint>& files, bool any_files, const Json& row);
  void check_score(const Json& row, bool saves);
  void try_to_stop(bool in_report);
  bool is_settled(const StateEntries* entries);
  [[noreturn]] void throw_stopped(bool saved);
};

}  // namespace muster::detail::train
