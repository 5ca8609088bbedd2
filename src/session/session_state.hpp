// The implementation of Session, for one attempt of training on one worker. This file only puts the parts together;
// each part is in a file of its own.
#pragma once

#include "base/export.hpp"
#include "muster/session.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/accumulated_gradients.hpp"
#include "session/attempt_end.hpp"
#include "session/bad_numbers.hpp"
#include "session/callback_end.hpp"
#include "session/epoch_end.hpp"
#include "session/late_ranks.hpp"
#include "session/outputs.hpp"
#include "session/prepared_models.hpp"
#include "session/profiler.hpp"
#include "session/resumer.hpp"
#include "session/same_passes.hpp"
#include "session/saved_values.hpp"
#include "session/saver.hpp"
#include "session/session_data.hpp"
#include "session/stopper.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <memory>
#include <optional>

namespace muster::detail::session {

struct ProcessGroups;

/// What this worker gives to a report.
struct ReportInput {
  const Metrics& metrics;
  std::shared_ptr<const StateEntries> entries = {};  ///< null if there is no State
  std::optional<Checkpoint> checkpoint = {};         ///< a Checkpoint that the program itself has made
  ReportOptions options = {};
};

/// A session: one member for each of its parts, and functions that use several parts.
struct MUSTER_INTERNAL_API SessionState {
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
               const Communicator& control, at::Device device, BadSteps& bad_steps);
  /// A session that validates `checkpoint`. `validators`: the ranks that validate, in a world of their own. Collective.
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& validators,
               at::Device device, const Checkpoint& checkpoint);
  ~SessionState();

  // The parts. Each part may use the parts above it; Resumer, Saver and Stopper reach them through the session.
  const run::ResolvedOptions& resolved;
  const run::RunFolder& run;
  WorkerContext workers;
  TrainingProgress progress;
  SessionData data;
  Outputs outputs;
  PreparedModels models;
  const std::shared_ptr<AttemptEnd> attempt_end = std::make_shared<AttemptEnd>();
  AccumulatedGradients gradients;
  SavedValues saved_values;
  std::shared_ptr<BadNumbersWatch> bad_numbers;  ///< null with BadNumbers::ignore
  SamePasses same_passes;
  EpochEnd epoch_end;
  Resumer resumer;
  Saver saver;
  Stopper stopper;
  CallbackEnd callback_end;
  std::optional<LateRanks> late_ranks;  ///< none in a session that validates
  std::optional<Profiler> profiler;     ///< none without RunConfig::profile
  std::shared_ptr<step::StepListener> step_listener;
  std::shared_ptr<ProcessGroups> process_groups;  ///< set by the backend
  bool has_failed = false;

  /// If this attempt has ended, throws the exception that ended it, since the training function may have caught it.
  /// Also throws if another rank has failed.
  void throw_if_ended() const;
  /// Throws an Error (ExitCode::usage) in a session that validates; `doing` says in its text what was refused. In a
  /// session that trains, calls throw_if_ended().
  void require_training(const char* doing) const;
  /// Implements State::restore(). Collective.
  bool restore(const std::shared_ptr<const StateEntries>& entries);
  /// Implements Session::report(). Collective.
  void report(const ReportInput& input);
  /// Called by the loop over session.epochs() when an epoch begins.
  void begin_epoch(std::int64_t epoch);
  /// Call it at a boundary outside of a report. Stops training if any worker was asked to; see
  /// Stopper::stop_if_asked().
  bool stop_if_asked();
  /// Implements Session::add_callback(). Collective.
  void add_callback(std::shared_ptr<Callback> callback);
  /// Ends training if the run resumes from a checkpoint in which a callback had already ended training. Collective.
  void end_if_already_done();
  /// Call it when the training function has returned, or a callback has ended it. Throws an Error if the function has
  /// not continued the pass in whose middle the run was saved, unless it counts epochs. Collective.
  void end_training();

 private:
  /// `validated`: the checkpoint that this session validates; none if the session trains.
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, WorkerContext workers,
               const std::optional<Checkpoint>& validated);
};

}  // namespace muster::detail::session
