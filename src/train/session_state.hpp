// What stands behind a Session for one attempt of training on one worker: its parts, and what it does with them.
#pragma once

#include "gradients/data_parallel.hpp"
#include "muster/session.hpp"
#include "optim/frozen.hpp"
#include "train/bad_numbers.hpp"
#include "train/resolve.hpp"
#include "train/run_folder.hpp"
#include "train/session_parts.hpp"
#include "train/stop.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::train {

struct ProcessGroups;
class Validation;

struct SessionState {
  SessionState(const Plan& plan, const RunFolder& run, const Communicator& workers, const Communicator& control,
               at::Device device, BadSteps& bad_steps);
  /// Of the ranks that validate that checkpoint; a world of their own. Collective.
  SessionState(const Plan& plan, const RunFolder& run, const Communicator& validators, at::Device device,
               const Checkpoint& checkpoint);

  const Plan& plan;
  const RunFolder& run;
  Workers workers;
  Counters counters;
  SessionData data;
  Outputs outputs;
  StartingPoint start;
  Stopping stop;
  std::shared_ptr<BadNumbersWatch> numbers;  ///< null where they are ignored

  std::vector<std::shared_ptr<gradients::DataParallel>> models;
  std::shared_ptr<optim::Freezables> freezables;  ///< null where nothing is saved behind training
  std::shared_ptr<int> no_sync_depth = std::make_shared<int>(0);
  std::shared_ptr<ProcessGroups> groups;  ///< set by the backend
  std::shared_ptr<Backend> backend;       ///< from its start to its shutdown
  bool failed = false;
  std::shared_ptr<step::Moments> moments;
  Validation* validation = nullptr;  ///< what reports ask for validations; null where nobody can

  /// An Error (ExitCode::usage) in a session that validates.
  void require_training(const char* doing) const;

  // resume.cpp

  /// Chooses what to go on from, and takes counters, history and preprocessor from there. Records nothing in the
  /// run's folder: the start may yet be refused. Collective.
  void resume();
  /// Called once a start can no longer be refused: after a restore, or at the latest with the first report or save or
  /// the end of training. Only now the run's folder changes: the rollback is confirmed, the checkpoint gets its name,
  /// and validations go on. Collective.
  void take_up();
  /// State::restore(): loads the entries, and epoch, position in the data and random state. Collective.
  bool restore(const std::shared_ptr<const StateEntries>& entries);
  /// Warns, once, of what begins again although the run goes on, when the first batch comes or a state is reported.
  void warn_of_what_begins_again(bool reports_state);

  // report.cpp

  /// Session::report(); without a state `entries` is null. Collective.
  void report(const Metrics& metrics, const std::shared_ptr<const StateEntries>& entries,
              const std::optional<Checkpoint>& files, const ReportOptions& options);

  /// Called by the loop over session.epochs() where an epoch begins.
  void begin_epoch(std::int64_t epoch);
  /// How often gradients of the prepared models have been averaged.
  std::int64_t averaged_gradients() const;
  /// Whether this epoch trains over data that muster does not know.
  bool over_own_data() const;
  /// Notes a report in an epoch over data that muster does not know.
  void note_report_of_epoch(bool has_state);
  /// Whether a checkpoint of now says that its epoch is over.
  bool epoch_complete() const;

  /// Warns, once, where a confusion matrix counts each sample of a dataset that is not split once per worker. The same
  /// metrics of all workers on each.
  void warn_of_whole_data(const std::vector<Json>& metrics);

  // save.cpp

  /// Commits a checkpoint, and gives it; `row` is an empty object between two reports. Collective.
  Checkpoint save(const StateEntries* entries, const std::optional<Checkpoint>& files, bool any_files, const Json& row);

  // stop.cpp

  /// At a boundary outside of a report, with no batch half used. Saves and throws if any worker has been asked to stop
  /// and no gradients are accumulated. Collective, now and then.
  void stop_if_asked();
  /// Whether this worker has been asked to stop, or knows that its time is over once all is saved.
  bool asked_to_stop();
  /// At the end of a report, which has saved or not. Collective.
  void stop_after_report(bool saved);
  /// Session::should_stop(). Collective.
  bool should_stop();
  /// Session::preemption(). Collective.
  Preemption preemption();
  /// Session::get_all_reported_checkpoints(). Collective.
  std::vector<ReportedCheckpoint> reported_checkpoints();
  /// Notes where a worker's callback wants training to end, and throws TrainingEnded unless it goes by calls.
  /// Collective.
  void end_if_callbacks_ask();
  /// Session::add_callback(). Collective.
  void add_callback(std::shared_ptr<Callback> callback);
  /// The same where training goes on from a checkpoint, from which a callback may know it. Collective.
  void end_if_known_done();
  /// The training function has returned.
  void end_training();

 private:
  /// Reads the checkpoint that training started from once more. An Error (ExitCode::retry) if it is not the same any
  /// more. Collective.
  checkpoint::Restored read_again();
  void save_and_stop(bool in_report);
  bool has_position() const;
  bool may_wait_for_a_step() const;
  bool no_gradients_wait(const StateEntries* entries);
  [[noreturn]] void throw_stopped(bool saved);
};

}  // namespace muster::detail::train
