// Saving a session: what its checkpoints hold. resumer.hpp is the inverse.
#pragma once

#include "base/export.hpp"
#include "checkpoint/store.hpp"
#include "muster/checkpoint.hpp"
#include "muster/state.hpp"
#include "optim/memory_snapshot.hpp"
#include "state/training_position.hpp"

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::session {

struct SessionState;

/// Gathers the contents of a checkpoint and gives them to the store.
class Saver {
 public:
  explicit Saver(SessionState& session);

  /// What the caller gives to a checkpoint, in addition to the session's own data.
  struct Contents {
    const StateEntries* entries = nullptr;             ///< null if there is no State
    const std::optional<Checkpoint>* given = nullptr;  ///< null if no rank has given a Checkpoint
    Json row = Json::object();                         ///< the report's row; empty between two reports
    bool must_wait = false;  ///< true if the run stops afterwards, so that the save must not run in the background
    bool leaves_out_state = false;  ///< true if there is a State to save, although `entries` may be null
  };
  /// Commits a checkpoint and returns it. Collective.
  MUSTER_INTERNAL_API Checkpoint save(const Contents& what);
  /// How long the last save() took to collect the entries, before anything was written.
  std::chrono::steady_clock::duration last_collect_duration() const noexcept { return collect_duration_; }

  /// The optimizers whose snapshots an asynchronous save uses; null without asynchronous saving.
  const std::shared_ptr<optim::SnapshotSources>& snapshot_sources() const noexcept { return snapshot_sources_; }
  /// Implements Session::get_all_reported_checkpoints(). Collective.
  std::vector<ReportedCheckpoint> reported_checkpoints() const;

 private:
  /// Returns the present position of training, for a checkpoint. `of_report`: true at a report, false between two
  /// reports.
  state::TrainingPosition training_position(bool of_report) const;
  /// Adds the files and entries of the Checkpoints that ranks have given. Collective.
  void merge_given(checkpoint::CheckpointContents& contents, const std::optional<Checkpoint>& given) const;

  SessionState& session_;
  std::shared_ptr<optim::SnapshotSources> snapshot_sources_;
  std::chrono::steady_clock::duration collect_duration_{0};
  bool has_warned_ = false;  ///< true if a warning has said that a checkpoint with files only leaves out the State
};

}  // namespace muster::detail::session
