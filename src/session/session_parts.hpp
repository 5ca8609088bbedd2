// The parts of a session: its progress, its worker, its data, its starting checkpoint and its outputs. Stopping is in
// stop.hpp.
#pragma once

#include "checkpoint/store.hpp"
#include "data/passes/pass_positions.hpp"
#include "data/passes/shard.hpp"
#include "muster/config.hpp"
#include "muster/preprocessor.hpp"
#include "observe/callbacks.hpp"
#include "observe/sinks.hpp"
#include "session/random.hpp"
#include "step/steps.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::session {

/// Reports in epochs over data that muster does not read itself. Index 0: reports without a State; 1: with one.
struct UnknownDataReports {
  struct Last {
    std::int64_t epoch = -1;
    std::int64_t averaged = 0;  ///< averages of gradients until the report, see SessionState::gradient_average_count()
  };
  std::array<Last, 2> reports = {};
  std::int64_t averaged_before = 0;               ///< averages of gradients until the epoch began
  std::array<bool, 2> reports_within_epoch = {};  ///< the program has trained between two reports of one epoch
  bool is_mid_epoch = false;                      ///< the last report may be in the middle of its epoch
  bool warned = false;
};

/// Progress and speed of training.
struct TrainingProgress {
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();  ///< epoch, global step, samples
  std::int64_t epoch_count = 0;  ///< the argument of session.epochs(); 0 if the training function counts epochs itself
  UnknownDataReports unknown_data = {};
  /// The last State was saved at `step`, in the middle of a pass over the dataset `dataset`.
  struct {
    std::string dataset = {};
    std::int64_t step = 0;
    bool warned = false;
  } unfinished_pass = {};
  bool is_between_epochs = false;       ///< between two epochs of the loop over session.epochs()
  std::int64_t training_iteration = 0;  ///< number of reports
  double seconds_in_earlier_jobs = 0;   ///< training time of earlier jobs
  Clock::time_point began_at = Clock::now();
  Clock::time_point last_report = began_at;

  /// Call when training begins.
  void start_clock() { began_at = last_report = Clock::now(); }
  double total_seconds() const {
    return seconds_in_earlier_jobs + std::chrono::duration<double>(Clock::now() - began_at).count();
  }
  /// Starts counting samples and time for the next report.
  void end_report() {
    steps->samples_since_report = 0;
    last_report = Clock::now();
  }
};

/// This worker among the others: its communicators, its device, its share of a step, its random generators.
struct WorkerContext {
  Communicator communicator;  ///< for the training function's use
  Communicator control;       ///< the same workers over another channel, for reports, checkpoints and stops
  at::Device device = at::kCPU;
  step::MicroBatchShare share = {};
  int full_worker_count = 0;  ///< see ResolvedOptions::full_worker_count; 0 with virtual workers
  std::uint64_t seed = 0;
  std::optional<MicroBatchGenerators> generators = {};  ///< with virtual workers

  int rank() const noexcept { return communicator.rank(); }
  int size() const noexcept { return communicator.size(); }
  bool is_first() const noexcept { return rank() == 0; }

  void seed_generators() {
    session::seed_generators(seed, rank());
    if (share.fixed) generators.emplace(seed, share.first, share.count, device);
  }
  /// The random state of this worker, or of all of its micro-batches, for a checkpoint.
  std::string random_state() { return generators ? generators->state() : generator_state(device); }
  /// Restores it. If the checkpoint does not hold it, seeds the generators from the seed and the number of reports.
  void restore_random_state(const checkpoint::RestoredCheckpoint& saved, std::int64_t training_iteration) {
    if (!generators && saved.random_state)
      set_generator_state(*saved.random_state, device);
    else
      session::seed_generators(seed, rank(), training_iteration);
    if (!generators) return;
    const auto size = generators->state_size();
    if (saved.random_states.size() == size * static_cast<std::size_t>(this->size()))
      generators->restore(saved.random_states.substr(size * static_cast<std::size_t>(rank()), size));
  }
};

/// The datasets: split among the workers, preprocessed, iterated over.
struct SessionData {
  std::map<std::string, Dataset> datasets;
  DataConfig config;
  PreprocessorPtr preprocessor;  ///< may be null
  std::shared_ptr<data::PassPositions> pass_positions;
  std::map<std::string, std::shared_ptr<data::ShardState>> shards = {};
  bool has_warned_of_unsplit_data = false;  ///< the warning that samples count once per worker was given

  /// Returns the shard of that name; makes it at its first use.
  std::shared_ptr<data::ShardState> shard(const std::string& name, const WorkerContext& workers);
  /// Loads the preprocessor's state from a checkpoint (`saved`; null: none), or fits the preprocessor unless it is
  /// fitted, and applies it to all datasets. `own`: the checkpoint is this run's, not another run's that this one
  /// starts from. Collective.
  void prepare_preprocessor(const Json& saved, bool own, const Communicator& control);
};

/// The checkpoint that the attempt goes on from.
struct ResumeSource {
  std::optional<Checkpoint> checkpoint = {};
  std::optional<checkpoint::RestoredCheckpoint> content = {};
  std::uint32_t manifest_crc32 = 0;  ///< of its manifest, when it was chosen
  std::string name = {};             ///< the name that a report of this run gave it; may be empty
  bool taken_up = false;             ///< SessionState::take_up() has been called
  Json callbacks = {};               ///< the callbacks' states in it, if it is this run's
  bool was_given_to_user = false;    ///< the training function has called get_checkpoint(), so it may load it itself
  bool has_warned = false;           ///< the warning that something begins again was given, or is not needed
};

/// The reason why a link in a run's folder must not have this name; none if it may.
std::optional<std::string> problem_with_name(const std::string& name);
/// Makes a link of that name to the checkpoint, unless the name is empty. Call on one rank. A failure is a warning.
void link_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept;

/// What a session writes: checkpoints, and events for sinks and callbacks.
struct Outputs {
  std::optional<checkpoint::CheckpointStore> store;  ///< none in a session that saves nothing, such as a validation
  observe::Sinks sinks;
  observe::Callbacks callbacks;
  CheckpointConfig config;
  bool is_first_worker = false;
  std::optional<Checkpoint> newest = {};            ///< this attempt's newest, or the one that it goes on from
  std::optional<Checkpoint> async_checkpoint = {};  ///< the one that is being written while training goes on
  std::string async_checkpoint_name = {};           ///< the user's name for it when it is written; may be empty
  bool score_reported = false;                      ///< a report had the metric by which the best checkpoints are kept
  bool has_warned_of_missing_score = false;         ///< the warning that a checkpoint lacks that metric was given

  /// Commits a checkpoint and returns it; it may still be being written. Collective.
  Checkpoint commit(checkpoint::CheckpointContents contents, checkpoint::CheckpointStore::Mode mode);
  /// Waits for the checkpoint that is being written; throws if it could not be written. Collective.
  void wait_for_save();
  /// The newest committed checkpoint. Waits for the one that is being written, but leaves its error to wait_for_save().
  /// Not collective.
  std::optional<Checkpoint> wait_for_newest() const;
  /// wait_for_save(), with the error as a warning.
  void wait_for_save_and_warn() noexcept;
  /// Checks that a checkpoint with this row has the score by which the best ones are kept. Throws an Error if the score
  /// is not a number, or if no report has had it. In the middle of an epoch the latter is only a warning, since a
  /// program may measure the score at the end of the epoch.
  void check_score(const Json& row, bool saves, bool epoch_complete);
};

}  // namespace muster::detail::session
