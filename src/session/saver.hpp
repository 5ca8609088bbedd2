// Saving a session: what its checkpoints hold. The inverse is resumer.hpp.
#pragma once

#include "base/export.hpp"
#include "muster/checkpoint.hpp"
#include "muster/state.hpp"
#include "optim/memory_snapshot.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/accumulated_gradients.hpp"
#include "session/epoch_end.hpp"
#include "session/outputs.hpp"
#include "session/resumer.hpp"
#include "session/session_data.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"
#include "state/training_position.hpp"

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::session {

/// Gathers what a checkpoint holds and gives it to the store.
class Saver {
 public:
  Saver(const run::ResolvedOptions& resolved, const run::RunFolder& run, WorkerContext& workers,
        const TrainingProgress& progress, const SessionData& data, Outputs& outputs, const EpochEnd& epoch_end,
        Resumer& resumer, AccumulatedGradients& gradients);

  /// What a checkpoint is made of, beside the session's own progress.
  struct Contents {
    const StateEntries* entries = nullptr;             ///< null: no State
    const std::optional<Checkpoint>* given = nullptr;  ///< null: no rank has given a Checkpoint
    Json row = Json::object();                         ///< empty between two reports
    bool must_wait = false;                            ///< the run stops, so nothing is saved in the background
    bool leaves_out_state = false;                     ///< the run has a State, which `entries` would save
  };
  /// Commits a checkpoint and returns it. Collective.
  MUSTER_INTERNAL_API Checkpoint save(const Contents& what);
  /// How long the last save() has taken before anything was written: the entries' own work.
  std::chrono::steady_clock::duration last_collect_duration() const noexcept { return collect_duration_; }

  /// The optimizers whose memory an asynchronous save keeps; null without asynchronous saving.
  const std::shared_ptr<optim::SnapshotSources>& snapshot_sources() const noexcept { return snapshot_sources_; }
  /// Session::get_all_reported_checkpoints(). Collective.
  std::vector<ReportedCheckpoint> reported_checkpoints() const;

 private:
  /// Where training is, as a checkpoint holds it.
  state::TrainingPosition training_position(bool of_report) const;
  /// Adds the entries of the checkpoints that ranks have given. Collective.
  void merge_given(checkpoint::CheckpointContents& contents, const std::optional<Checkpoint>& given) const;

  const run::ResolvedOptions& resolved_;
  const run::RunFolder& run_;
  WorkerContext& workers_;
  const TrainingProgress& progress_;
  const SessionData& data_;
  Outputs& outputs_;
  const EpochEnd& epoch_end_;
  Resumer& resumer_;
  AccumulatedGradients& gradients_;
  std::shared_ptr<optim::SnapshotSources> snapshot_sources_;
  std::chrono::steady_clock::duration collect_duration_{0};
  bool has_warned_ = false;  ///< that a checkpoint of files alone leaves out the State
};

}  // namespace muster::detail::session
