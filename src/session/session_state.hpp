// The implementation of a Session, for one attempt of training on one worker: its parts and its functions.
#pragma once

#include "gradients/data_parallel.hpp"
#include "muster/session.hpp"
#include "optim/memory_snapshot.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/bad_numbers.hpp"
#include "session/session_parts.hpp"
#include "session/stop.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::session {

struct ProcessGroups;
class Validation;

struct SessionState {
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
               const Communicator& control, at::Device device, BadSteps& bad_steps);
  /// A session that validates `checkpoint`. `validators` is a world of its own. Collective.
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& validators,
               at::Device device, const Checkpoint& checkpoint);

  const run::ResolvedOptions& resolved;
  const run::RunFolder& run;
  WorkerContext workers;
  TrainingProgress counters;
  SessionData data;
  Outputs outputs;
  ResumeSource start;
  StopState stop;
  std::shared_ptr<BadNumbersWatch> bad_numbers_watch;  ///< null with BadNumbers::ignore

  std::vector<std::shared_ptr<gradients::DataParallel>> models;
  std::shared_ptr<optim::SnapshotSources> snapshot_sources;  ///< null without asynchronous saving
  std::shared_ptr<int> no_sync_depth = std::make_shared<int>(0);
  std::shared_ptr<ProcessGroups> process_groups;  ///< set by the backend
  std::shared_ptr<Backend> backend;               ///< set between its start and its shutdown
  bool has_failed = false;
  std::shared_ptr<step::StepListener> step_listener;
  Validation* validation = nullptr;  ///< null without a validation function

  /// Throws an Error (ExitCode::usage) in a session that validates.
  void require_training(const char* doing) const;

  // resume.cpp

  /// Chooses the checkpoint to go on from, and restores counters, history and preprocessor from it. Changes nothing in
  /// the run's folder, since the start may still be refused. Collective.
  void resume();
  /// Called once a start can no longer be refused: after a restore, or at the latest with the first report or save or
  /// the end of training. Only now the run's folder changes: the rollback is confirmed, the checkpoint gets its name,
  /// and validations go on. Collective.
  void take_up();
  /// State::restore(): loads the entries, the epoch, the position in the data and the random state. True if there was
  /// something to load. Collective.
  bool restore(const std::shared_ptr<const StateEntries>& entries);
  /// Warns once, at the first batch or the first report with a state, if the run goes on from a checkpoint but the
  /// training function has not restored everything from it.
  void warn_of_unrestored_state(bool reports_state);

  // report.cpp

  /// Session::report(). `entries` is null without a state. Collective.
  void report(const Metrics& metrics, const std::shared_ptr<const StateEntries>& entries,
              const std::optional<Checkpoint>& files, const ReportOptions& options);

  /// The loop over session.epochs() calls it when an epoch begins.
  void begin_epoch(std::int64_t epoch);
  /// How often the gradients of the prepared models have been averaged, summed over the models.
  std::int64_t gradient_average_count() const;
  /// True if this epoch trains on data that muster does not read itself.
  bool trains_on_unknown_data() const;
  /// Notes a report in an epoch over such data.
  void note_report_on_unknown_data(bool has_state);
  /// True if a checkpoint that is saved now marks its epoch as complete.
  bool is_epoch_complete() const;

  /// Warns once if a confusion matrix counts each sample once per worker, since a dataset is not split. `metrics` are
  /// those of all workers, the same on each of them.
  void warn_of_unsplit_data(const std::vector<Json>& metrics);

  // save.cpp

  /// Commits a checkpoint and returns it. `row` is an empty object between two reports. Collective.
  Checkpoint save(const StateEntries* entries, const std::optional<Checkpoint>& files, bool any_files, const Json& row);

  // stop.cpp

  /// Call at a boundary outside of a report, between two batches. Saves and throws if any worker has been asked to stop
  /// and no gradients are accumulated. Collective at some of the boundaries, the same ones on all workers.
  void stop_if_asked();
  /// True if this worker has been asked to stop, or has only the time left that it needs to save.
  bool is_asked_to_stop();
  /// Call at the end of a report; `saved`: it has saved a checkpoint. Stops if any worker was asked to. Collective.
  void stop_if_asked_after_report(bool saved);
  /// Session::should_stop(). Collective.
  bool should_stop();
  /// Session::preemption(). Collective.
  Preemption preemption();
  /// Session::get_all_reported_checkpoints(). Collective.
  std::vector<ReportedCheckpoint> reported_checkpoints();
  /// Checks whether a callback on any worker wants training to end. If so, throws TrainingEndedByCallback, except in an
  /// operator's run. Collective.
  void end_if_callbacks_ask();
  /// Session::add_callback(). Collective.
  void add_callback(std::shared_ptr<Callback> callback);
  /// Calls end_if_callbacks_ask() if training goes on from a checkpoint, whose callback states may say so. Collective.
  void end_if_already_done();
  /// Call when the training function has returned.
  void end_training();

 private:
  /// Reads the checkpoint that training started from once more. An Error (ExitCode::retry) if it is not the same any
  /// more. Collective.
  checkpoint::RestoredCheckpoint read_again();
  void save_and_stop(bool in_report);
  bool has_position() const;
  bool may_wait_for_a_step() const;
  /// Also counts the boundaries with accumulated gradients.
  bool has_no_accumulated_gradients(const StateEntries* entries);
  [[noreturn]] void throw_stopped(bool saved);
};

}  // namespace muster::detail::session
