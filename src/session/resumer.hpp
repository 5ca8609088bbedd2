// Resuming: chooses the checkpoint that a session goes on from, and restores it. The inverse is saver.hpp.
#pragma once

#include "checkpoint/store.hpp"
#include "muster/checkpoint.hpp"
#include "muster/state.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/epoch_end.hpp"
#include "session/outputs.hpp"
#include "session/prepared_models.hpp"
#include "session/session_data.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::session {

/// Chooses the checkpoint to go on from and restores the session from it. Many members: the parts of the session that
/// it fills, and what the checkpoint holds until they take it up.
class Resumer {
 public:
  Resumer(const run::ResolvedOptions& resolved, const run::RunFolder& run, WorkerContext& workers,
          TrainingProgress& progress, SessionData& data, Outputs& outputs, PreparedModels& models, EpochEnd& epoch_end)
      : resolved_(resolved),
        run_(run),
        workers_(workers),
        progress_(progress),
        data_(data),
        outputs_(outputs),
        models_(models),
        epoch_end_(epoch_end) {}

  /// Chooses the checkpoint to go on from, and restores counters, history and preprocessor from it. Changes nothing in
  /// the run's folder, since the start may still be refused. Collective.
  void resume();
  /// Called once a start can no longer be refused: after a restore, or at the latest with the first report or save or
  /// the end of training. Only now the run's folder changes: the rollback is confirmed, the checkpoint gets its name,
  /// and validations go on. Collective.
  void take_up();
  /// Throws an Error if a report has saved since the run was started.
  void require_nothing_saved() const;
  /// State::restore(): loads the entries, gradients that wait for a step, the epoch, the position in the data and the
  /// random state. True if there was something to load. Collective.
  bool restore(const StateEntries& entries);

  /// The checkpoint that this attempt goes on from.
  const std::optional<Checkpoint>& checkpoint() const noexcept { return checkpoint_; }
  /// The callbacks' states in it, if it is this run's. The second call returns null.
  Json take_callback_states() { return std::exchange(callback_states_, {}); }
  /// The training function has called get_checkpoint(), so it may load the checkpoint itself.
  void note_given_to_user() noexcept { was_given_to_user_ = true; }
  /// Warns once, at the first batch or the first report with a state, if the run goes on from a checkpoint but the
  /// training function has not restored everything from it.
  void warn_of_unrestored_state(bool reports_state);

 private:
  /// Takes counters, last row and callbacks from this run's checkpoint. Collective.
  observe::AttemptStart restore_position(const checkpoint::RestoredCheckpoint& content);
  /// True if the checkpoint was saved between two passes of its epoch, which the run has learned only afterwards.
  /// Collective.
  bool is_between_passes(const state::TrainingPosition& position);
  /// Reads the checkpoint once more. An Error (ExitCode::retry) if it is not the same any more. Collective.
  checkpoint::RestoredCheckpoint read_again();

  const run::ResolvedOptions& resolved_;
  const run::RunFolder& run_;
  WorkerContext& workers_;
  TrainingProgress& progress_;
  SessionData& data_;
  Outputs& outputs_;
  PreparedModels& models_;
  EpochEnd& epoch_end_;
  // Sixteen members: the eight above are what is restored, those below belong to the checkpoint.
  std::optional<Checkpoint> checkpoint_ = {};
  std::optional<checkpoint::RestoredCheckpoint> content_ = {};
  std::uint32_t manifest_checksum_ = 0;  ///< of its manifest, when it was chosen
  std::string name_ = {};                ///< the name that a report of this run gave it; may be empty
  Json callback_states_ = {};
  bool taken_up_ = false;
  bool was_given_to_user_ = false;
  bool has_warned_ = false;  ///< the warning that something begins again was given, or is not needed
};

}  // namespace muster::detail::session
