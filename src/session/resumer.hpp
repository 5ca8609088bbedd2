// Resuming: chooses the checkpoint that a session resumes from, and restores it. saver.hpp is the inverse.
#pragma once

#include "checkpoint/store.hpp"
#include "muster/checkpoint.hpp"
#include "muster/state.hpp"
#include "session/outputs.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::session {

struct SessionState;

/// Chooses the checkpoint to resume from, and restores the session from it.
class Resumer {
 public:
  explicit Resumer(SessionState& session) : session_(session) {}

  /// Chooses the checkpoint, and restores counters, history and preprocessor from it. Changes nothing in the run's
  /// folder except the names of damaged checkpoints, since the start may still be refused. Collective.
  void resume();
  /// Called when the start can no longer be refused: after a restore, or at the latest with the first report or save or
  /// at the end of training. Only now the run's folder changes further: the rollback is confirmed, the checkpoint gets
  /// its name, and pending validations are requested. Does nothing at further calls, or without a checkpoint to resume
  /// from. Collective.
  void confirm_start();
  /// Throws an Error if a report has saved a checkpoint since this attempt began.
  void require_nothing_saved() const;
  /// Implements State::restore(): loads the entries, the gradients that wait for a step, the epoch, the position in the
  /// data and the random state; from a checkpoint that no run has saved, only entries. True if there was something to
  /// load. Collective.
  bool restore(const StateEntries& entries);

  /// The checkpoint that this attempt resumes from; none if it starts from the beginning.
  const std::optional<Checkpoint>& checkpoint() const noexcept { return checkpoint_; }
  /// Returns the states of callbacks in the checkpoint, if it is this run's. Further calls return null.
  Json take_callback_states() { return std::exchange(callback_states_, {}); }
  /// Called when the training function has called get_checkpoint(): it may load the checkpoint itself.
  void note_given_to_user() noexcept { was_given_to_user_ = true; }
  /// Warns once if there is a checkpoint to resume from but the training function has not restored everything from it.
  /// Called at each batch and at each report. `reports_state`: true at a report with a State.
  void warn_of_unrestored_state(bool reports_state);

 private:
  /// Restores counters, the last row and the callbacks' states from this run's checkpoint. Collective.
  observe::AttemptStart restore_position(const checkpoint::RestoredCheckpoint& content);
  /// True if the checkpoint was saved between two passes of its epoch. The checkpoint itself may say that its epoch was
  /// complete: only later has the run learned that its epochs have further passes, and has noted this in its folder.
  /// Sets passes_before_more and resumed_after of Steps::epoch. Collective.
  bool is_between_passes(const state::TrainingPosition& position);
  /// Reads the checkpoint again, for a second restore(). Throws an Error (ExitCode::retry) if it has changed since it
  /// was chosen. Collective.
  checkpoint::RestoredCheckpoint read_again();

  SessionState& session_;
  std::optional<Checkpoint> checkpoint_ = {};
  std::optional<checkpoint::RestoredCheckpoint> content_ = {};
  std::uint32_t manifest_checksum_ = 0;  ///< CRC-32 of the checkpoint's manifest when it was chosen
  std::string name_ = {};                ///< the name that a report has given the checkpoint; may be empty
  Json callback_states_ = {};
  bool is_start_confirmed_ = false;
  bool was_given_to_user_ = false;
  bool has_warned_ = false;  ///< true if warn_of_unrestored_state() has warned, or need not warn any more
};

}  // namespace muster::detail::session
