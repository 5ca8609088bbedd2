// The parts of a session: how far it has come, its place among the workers, its data, what it goes on from and what it
// puts out. How it stops is in stop.hpp.
#pragma once

#include "checkpoint/store.hpp"
#include "data/passes/cursors.hpp"
#include "data/passes/shard.hpp"
#include "muster/config.hpp"
#include "muster/preprocessor.hpp"
#include "observe/callbacks.hpp"
#include "observe/sinks.hpp"
#include "step/steps.hpp"
#include "train/random.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::train {

/// Reports in epochs over data that muster does not know; [0] without a State, [1] with one.
struct OwnDataReports {
  struct Last {
    std::int64_t epoch = -1;
    std::int64_t averaged = 0;  ///< gradients of prepared models, at the report
  };
  std::array<Last, 2> reports = {};
  std::int64_t averaged_before = 0;  ///< gradients of prepared models, when the epoch began
  std::array<bool, 2> several = {};  ///< the program trains between two reports of one epoch
  bool amid_epoch = false;           ///< so the last report need not be at the end of its epoch
  bool warned = false;
};

/// How far training has come, and how fast it goes.
struct Counters {
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();  ///< epoch, global step, samples
  std::int64_t epochs = 0;  ///< of session.epochs(); 0 where the training function counts by itself
  OwnDataReports own_data = {};
  /// The last State was saved at that step, with a pass under way over `of` that had samples left.
  struct {
    std::string of = {};
    std::int64_t step = 0;
    bool warned = false;
  } rest_left = {};
  bool epoch_over = false;              ///< between two epochs of that loop
  std::int64_t training_iteration = 0;  ///< reports
  double seconds_before = 0;            ///< of training, in earlier jobs
  Clock::time_point begin = Clock::now();
  Clock::time_point last_report = begin;

  /// Training begins now.
  void start_clock() { begin = last_report = Clock::now(); }
  double total_seconds() const { return seconds_before + std::chrono::duration<double>(Clock::now() - begin).count(); }
  /// The samples and the time of the next report are counted from here.
  void end_report() {
    steps->samples_since_report = 0;
    last_report = Clock::now();
  }
};

/// A worker among the others: how they talk, what it computes on, what it takes of a step, its random generators.
struct Workers {
  Communicator own;      ///< for the training function
  Communicator control;  ///< the same workers over another channel, for reports, checkpoints and stops
  at::Device device = at::kCPU;
  step::Share share = {};
  int full = 0;  ///< where fewer may go on: the workers when none is missing
  std::uint64_t seed = 0;
  std::optional<MicroBatchGenerators> generators = {};  ///< with virtual workers

  int rank() const noexcept { return own.rank(); }
  int size() const noexcept { return own.size(); }
  bool is_first() const noexcept { return rank() == 0; }

  void seed_generators() {
    train::seed_generators(seed, rank());
    if (share.fixed) generators.emplace(seed, share.first, share.count, device);
  }
  /// The random state of this worker, or of all of its micro-batches, for a checkpoint; and back, as far as the
  /// checkpoint has it, else seeded anew by the reports that there have been.
  std::string random_state() { return generators ? generators->state() : generator_state(device); }
  void restore_random_state(const checkpoint::Restored& saved, std::int64_t training_iteration) {
    if (!generators && saved.random_state)
      set_generator_state(*saved.random_state, device);
    else
      train::seed_generators(seed, rank(), training_iteration);
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
  std::shared_ptr<data::Cursors> cursors;
  std::map<std::string, std::shared_ptr<data::ShardState>> shards = {};
  bool whole_counted = false;  ///< that samples count once per worker has been said

  /// The shard of that name, made at its first use.
  std::shared_ptr<data::ShardState> shard(const std::string& name, const Workers& workers);
  /// Fits the preprocessor unless it is, or loads what a checkpoint has of it (null: nothing), and lays it over all
  /// datasets. `own`: the checkpoint is of this run, and not one that it has begun from. Collective.
  void preprocess(const Json& saved, bool own, const Communicator& control);
};

/// What the attempt goes on from.
struct StartingPoint {
  std::optional<Checkpoint> from = {};
  std::optional<checkpoint::Restored> content = {};
  std::uint32_t manifest_crc32 = 0;  ///< of its manifest, when it was chosen
  std::string name = {};             ///< that a report of this run gave it; may be empty
  bool taken_up = false;             ///< SessionState::take_up() has been called
  Json callbacks = {};               ///< their states in it, if it is this run's
  bool handed_out = false;           ///< the training function loads the checkpoint by itself
  bool loss_reported = false;        ///< that something begins again has been said, or there was no need to
};

/// Whether a link of that name may stand in a run's folder; else why not.
std::optional<std::string> wrong_with_name(const std::string& name);
/// A link of that name to the checkpoint; none where it is empty. By one rank; what cannot be made is a warning.
void give_name(const std::filesystem::path& checkpoint, const std::string& name) noexcept;

/// Checkpoints, and for sinks and callbacks what they want to know.
struct Outputs {
  std::optional<checkpoint::Store> store;  ///< none where nothing is saved, as in a validation
  observe::Sinks sinks;
  observe::Callbacks callbacks;
  CheckpointConfig config;
  bool first_worker = false;
  std::optional<Checkpoint> newest = {};  ///< committed in this attempt, else what it goes on from
  std::optional<Checkpoint> behind = {};  ///< what is being written while training goes on
  std::string name_of_behind = {};        ///< that it gets when it is there; may be empty
  bool score_reported = false;            ///< the metric by which the best checkpoints are kept
  bool score_missed = false;              ///< and that it is not there with a checkpoint has been said

  /// Gives the checkpoint, or the one that it will be. Collective, as the next ones.
  Checkpoint commit(checkpoint::Contents contents, checkpoint::Store::When when);
  /// Waits for what is being written; throws the error that it ended with.
  void settle();
  /// The newest of all that have been committed; waits for what is being written, and leaves its error to settle(). Not
  /// collective.
  std::optional<Checkpoint> newest_of_all() const;
  /// settle() where something else matters more: the error is a warning.
  void settle_quietly() noexcept;
  /// An Error where a checkpoint would be saved with this row, and the score by which the best are kept is no number
  /// in it or in no report at all. In the middle of an epoch it may be yet to come, as what is measured at its end.
  void check_score(const Json& row, bool saves, bool epoch_complete);
};

}  // namespace muster::detail::train
