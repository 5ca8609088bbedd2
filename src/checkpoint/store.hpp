// The checkpoints of a run: all ranks together commit, find, restore and prune them. The files in checkpoint/files/
// define the content of a checkpoint; the tier defines where it lies.
#pragma once

#include "checkpoint/background_save.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/save.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/state.hpp"
#include "state/replication.hpp"
#include "state/training_position.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

/// The content of a checkpoint, as read() returns it.
struct RestoredCheckpoint {
  StateDict state;                          ///< on the CPU
  std::optional<std::string> random_state;  ///< this rank's; none if another number of ranks has saved
  std::string random_states;                ///< of all ranks that have saved, concatenated in the order of ranks
  Json position_json;
  state::TrainingPosition position;  ///< `position_json`, parsed and checked
  Json metrics;
  std::map<std::string, bool> per_rank = {};  ///< see Manifest::per_rank
  int world_size = 1;                         ///< number of ranks that have saved
  std::uint32_t manifest_checksum = 0;        ///< CRC-32 of the manifest that was read; 0 if there is none
};

/// Saves, finds and restores the checkpoints of a run. Member functions are collective over the communicator and return
/// or throw alike on every rank, unless they say otherwise.
class CheckpointStore {
 public:
  enum class Mode { sync, async };

  /// `run` is the run's folder; it must exist. The constructor completes copies from the fast tiers of earlier jobs,
  /// removes interrupted saves, and makes this job's fast tier if `config` names one.
  CheckpointStore(Communicator communicator, std::filesystem::path run, CheckpointConfig config);
  CheckpointStore(const CheckpointStore&) = delete;
  CheckpointStore& operator=(const CheckpointStore&) = delete;

  /// Compares the state of all ranks, writes it, publishes the checkpoint, and prunes older ones. If any rank fails,
  /// nothing is published and nothing is lost. With Mode::async, if async_save is set or there is a fast tier, it
  /// returns once `contents` are copied; then a background thread of each rank does the rest. Copying from a fast tier
  /// to the run's folder is done in the background in either mode. If only one thread may call MPI, commit() does all
  /// of this before it returns. Returns the checkpoint that is published, or will be. While a save runs in the
  /// background, call finish() first.
  Checkpoint commit(CheckpointContents contents, Mode mode = Mode::sync);
  /// Waits for the save in the background. Returns its error if it failed; then no earlier checkpoint is lost, and the
  /// index is not used again.
  std::optional<Error> finish() { return background_.finish(); }
  /// Called on rank 0: a checkpoint is not pruned as long as `needed` returns true for the training iteration of its
  /// report. The thread that writes the checkpoints calls `needed`. Not collective.
  void set_keep_predicate(std::function<bool(std::int64_t training_iteration)> needed) {
    is_needed_ = std::move(needed);
  }
  /// Tells whether a save runs in the background, and how long saves take. Not collective.
  const BackgroundSave& background() const noexcept { return background_; }

  /// Returns the newest intact checkpoint that is not rolled back, or, before confirm_rollback(), the one that the run
  /// rolls back to; none if there is no checkpoint. Throws an Error (ExitCode::data) if all are damaged or rolled back.
  /// Renames damaged checkpoints to ….damaged, with a warning. Before that, ….damaged checkpoints that are intact
  /// again, and newer than all published ones, get their names back. Only content counts as damage: a missing file, a
  /// wrong size, a wrong checksum, an impossible manifest. If files cannot be read, or ranks see different files,
  /// throws an Error (ExitCode::retry) and renames nothing.
  std::optional<Checkpoint> newest();

  /// Rolls back to a checkpoint: until a checkpoint newer than all present ones is committed, newest() returns it. Does
  /// nothing if the run's last rollback went to it already. Writes nothing before confirm_rollback(). `name`: the
  /// user's name for the checkpoint. Throws an Error (ExitCode::data) if the checkpoint is missing, damaged or a copy
  /// of another one.
  void roll_back(int index, const std::string& name = {});
  /// Records the rollback in the run's folder, after all ranks have restored the checkpoint. commit() calls it, too.
  void confirm_rollback();
  /// Returns the run's rollbacks, with one that is not confirmed yet. Not collective; for rank 0.
  std::vector<Rollback> rollbacks() const;
  /// True if the user gave this name for the checkpoint of the last rollback, whatever the name refers to now. Then it
  /// also logs that the run has gone back already. Not collective; for rank 0.
  bool has_rolled_back(const std::string& name) const;

  /// Reads a checkpoint. Verifies it first, unless newest() or roll_back() has just done so. Of a checkpoint that no
  /// run has made (Checkpoint::from_dict()), returns only the state, which merge_entries() merges over the ranks, and
  /// the manifest's checksum. Tensors may be views of the file, which takes disk space until they are gone. Returns an
  /// empty result for a directory that is not a muster checkpoint. Throws an Error (ExitCode::retry) if the directory
  /// is no longer there, or if the ranks see different checkpoints of a run.
  RestoredCheckpoint read(const Checkpoint& checkpoint) const;

  /// Returns the handle with its symbolic links resolved, so that later reads find the same directory. Throws an Error
  /// (ExitCode::retry) if the directory is not there. Not collective.
  static Checkpoint resolved(Checkpoint checkpoint);

  /// Returns the handle with this rank's number, so that its load() returns this rank's values of per-rank entries. Not
  /// collective.
  Checkpoint as_this_rank(Checkpoint checkpoint) const;

 private:
  state::RankInGroup here() const noexcept { return {communicator_.rank(), communicator_.size()}; }
  /// Returns what is wrong with the content of the checkpoint; empty if it is intact. Each rank verifies its share of
  /// the checksums. The ranks of each node read all data that every rank needs, so the node's page cache has it
  /// afterwards. Throws an Error (ExitCode::retry) if the checkpoint cannot be read or ranks see different files.
  std::string problem_of(const std::filesystem::path& checkpoint) const;
  /// Renames ….damaged checkpoints back that are intact and newer than all published checkpoints.
  void restore_repaired() const;
  /// Moves the names of each rolled-back checkpoint to the newest other checkpoint whose report gave the name; removes
  /// them if there is none. Does the same for checkpoint `quarantined`, which newest() has just set aside. Not
  /// collective.
  void move_names(std::optional<int> quarantined = {}) const;
  void log_rolled_back(int index) const;
  // Steps of commit():
  /// Writes the checkpoint and has it published: in the fast tier if there is one, otherwise in the run's folder.
  void write(const Communicator& communicator, Save& save);
  /// Called when the checkpoint is published. Copies it from the fast tier to the run's folder, if needed, and removes
  /// what is no longer needed.
  void settle(const Communicator& communicator, const Save& save);

  /// The indices that the next checkpoints get.
  struct Indices {
    int next = 0;  ///< above the indices of all earlier saves
    /// Indices from `next` on that are in the name of a folder of the run, and so cannot be used.
    std::set<int> taken = {};
    /// Returns the index of the next save.
    int next_free() {
      while (taken.contains(next)) ++next;
      return next;
    }
  };
  /// The checkpoint that was verified last; read() does not verify it again.
  struct Verified {
    std::filesystem::path path = {};
    Manifest manifest = {};
    std::shared_ptr<const MappedState> state = {};
  };

  Communicator communicator_;
  std::shared_ptr<storage::Tier> tier_;  // the tier of the run's folder
  CheckpointConfig config_;
  FastTiers fast_tiers_;
  LastSave last_save_;
  std::function<bool(std::int64_t)> is_needed_ = {};
  Indices indices_;
  std::optional<Rollback> rollback_ = {};  // null unless there is a rollback to confirm
  mutable Verified verified_;
  BackgroundSave background_;  // declared last: its thread uses the other members
};

}  // namespace muster::detail::checkpoint
