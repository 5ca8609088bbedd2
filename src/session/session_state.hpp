// The implementation of a Session, for one attempt of training on one worker. It only puts the parts together; what
// each of them does stands in its own file.
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
  std::shared_ptr<const StateEntries> entries = {};  ///< null without a State
  std::optional<Checkpoint> checkpoint = {};         ///< of the user's own
  ReportOptions options = {};
};

/// A session as the sum of its parts, a member for each.
struct MUSTER_INTERNAL_API SessionState {
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
               const Communicator& control, at::Device device, BadSteps& bad_steps);
  /// A session that validates `checkpoint`. `validators` is a world of its own. Collective.
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& validators,
               at::Device device, const Checkpoint& checkpoint);
  ~SessionState();

  // One member for each part of a session. Each part may use those above it.
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

  /// Throws what has ended this attempt, if it has ended: muster's own decision, or another rank's error. The training
  /// function may have caught it before.
  void throw_if_ended() const;
  /// The same, and throws an Error (ExitCode::usage) in a session that validates.
  void require_training(const char* doing) const;
  /// State::restore(). Collective.
  bool restore(const std::shared_ptr<const StateEntries>& entries);
  /// Session::report(). Collective.
  void report(const ReportInput& input);
  /// The loop over session.epochs() calls it when an epoch begins.
  void begin_epoch(std::int64_t epoch);
  /// Call at a boundary outside of a report. Stops if any worker was asked to; see Stopper::stop_if_asked().
  bool stop_if_asked();
  /// Session::add_callback(). Collective.
  void add_callback(std::shared_ptr<Callback> callback);
  /// Ends training if it goes on from a checkpoint whose callbacks' states say that it is done. Collective.
  void end_if_already_done();
  /// Call when the training function has returned.
  void end_training();

 private:
  /// `validated`: the checkpoint that this session validates; none if it trains.
  SessionState(const run::ResolvedOptions& resolved, const run::RunFolder& run, WorkerContext workers,
               const std::optional<Checkpoint>& validated);
};

}  // namespace muster::detail::session
