// The steps of one save: the ranks compare what they save, write it, and publish the checkpoint.
//
//   At once:                                          In the background:
//   save.prepare(communicator);                       save.prepare(communicator);
//   save.write(communicator);                         save.take_snapshot(communicator);
//   save.complete(communicator);                      … then write() and complete() on another thread, over another
//                                                     communicator
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/snapshot.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/user_files.hpp"
#include "checkpoint/state_save.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "optim/memory_snapshot.hpp"
#include "state/replication.hpp"
#include "storage/tier.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

using Clock = std::chrono::steady_clock;

/// The content of one checkpoint.
struct CheckpointContents {
  Clock::time_point began_at = Clock::now();            ///< when the session began this save
  StateDict state = {};                                 ///< has the same names and shapes on all ranks
  state::EntryReplication replication = {};             ///< by entry: whether all ranks have the same values
  std::string random_state = {};                        ///< this rank's, as bytes; has the same length on every rank
  std::optional<std::filesystem::path> directory = {};  ///< folder with the user's files of this rank
  Json position_json = Json::object();                  ///< a state::TrainingPosition as JSON
  Json metrics = Json::object();                        ///< metrics of the report, with the score
  /// The trainer's metadata; metadata that the user has set in `directory` replaces it.
  Json metadata = Json::object();
  /// Unchanging copies of parts of the state, so that take_snapshot() need not copy these.
  std::vector<optim::MemorySnapshot> snapshots = {};
};

/// The tier that a checkpoint is written to, and this rank's part in it.
struct SaveTarget {
  std::shared_ptr<storage::Tier> tier;
  /// True if this rank creates and publishes the checkpoint: on rank 0, or on the first rank of each node.
  bool is_leader = false;
  bool is_per_node = false;  ///< true if each node has a tier of its own, which the node's ranks write to
};

/// Memory and a layout that the next save uses again.
struct LastSave {
  Layout layout = {};
  StateWriter writer;
  Snapshot snapshot;
};

/// One save. All member functions are collective, except the getters and or_abandon().
class Save {
 public:
  /// `last` must outlive this object.
  Save(CheckpointContents contents, int index, SaveTarget target, LastSave& last);
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  /// Compares what the ranks save, except for the values of tensors, and copies the user's files.
  void prepare(const Communicator& communicator);
  /// Compares the values of tensors and copies this rank's part. Afterwards the program may change the state.
  void take_snapshot(const Communicator& communicator) { state_.take_snapshot(communicator, last_.snapshot); }
  /// Writes state.h5. If there is no snapshot, it also compares the values of tensors.
  void write(const Communicator& communicator);
  /// Writes the manifest and gives the checkpoint its published name. Called after write() has ended on all ranks.
  void complete(const Communicator& communicator);
  /// Calls `steps`, which calls some of the functions above. If `steps` throws, removes the unfinished checkpoint if
  /// this rank is its leader (SaveTarget::is_leader), and rethrows.
  template <class Work>
  void or_abandon(const Work& steps) const {
    try {
      steps();
    } catch (...) {
      if (target_.is_leader) target_.tier->abandon(index_);
      throw;
    }
  }

  int index() const noexcept { return index_; }
  /// Returns the published manifest.
  const Manifest& manifest() const noexcept { return manifest_; }
  /// Return the pieces of state.h5 and the names of the user's files that `rank` has written.
  std::vector<std::uint64_t> pieces_of(int rank) const { return state_.pieces_of(rank); }
  std::vector<std::string> files_of(int rank) const;

 private:
  /// Creates the checkpoint's hidden folder and state.h5 in it; does nothing if they exist already.
  void open(const Communicator& communicator);
  void copy_files(const Communicator& communicator);
  Manifest make_manifest() const;

  CheckpointContents contents_;
  const int index_;
  const SaveTarget target_;
  LastSave& last_;
  StateSave state_;
  std::vector<UserFiles> files_;                           // [ranks]
  std::vector<std::vector<FileEntry>> copied_files_ = {};  // [ranks], entries of the files that a rank has
  bool opened_ = false;
  Manifest manifest_ = {};
};

}  // namespace muster::detail::checkpoint
