// The protocol of one save: compare the contents of all ranks, write them, publish the checkpoint.
//
//   At once:                                          In the background:
//   save.prepare(communicator);                       save.prepare(communicator);
//   save.write(communicator);                         save.take_snapshot(communicator);
//   save.publish(communicator);                       … then write() and publish() on another thread, over another
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
  Clock::time_point began_at = Clock::now();            ///< when the save began
  StateDict state = {};                                 ///< same names and shapes on all ranks
  state::EntryReplication replication = {};             ///< which entries may differ between ranks
  std::string random_state = {};                        ///< this rank's, as bytes; same length on every rank
  std::optional<std::filesystem::path> directory = {};  ///< the user's files on this rank
  Json progress = Json::object();  ///< training_iteration, epoch, position, seed …, set by the session
  Json metrics = Json::object();   ///< metrics of the report, the score among them
  Json metadata = Json::object();  ///< the trainer's; metadata that the user set in `directory` wins
  std::vector<optim::MemorySnapshot> snapshots = {};  ///< snapshots of parts of the state, which need not be copied
};

/// Where a checkpoint is written.
struct SaveTarget {
  std::shared_ptr<storage::Tier> tier;
  bool is_leader = false;    ///< this rank creates the folder and publishes it: rank 0, or the first rank of each node
  bool is_per_node = false;  ///< each node has its own folder, which its ranks write to
};

/// What the next save may use again.
struct LastSave {
  Layout layout = {};
  StateWriter writer;
  Snapshot snapshot;
};

/// One save. All member functions are collective, except the getters and or_abandon().
class Save {
 public:
  /// `last` must outlive this.
  Save(CheckpointContents contents, int index, SaveTarget target, LastSave& last);
  Save(const Save&) = delete;
  Save& operator=(const Save&) = delete;

  /// Compares what is to be saved, except for the values of tensors, and copies the user's files.
  void prepare(const Communicator& communicator);
  /// Compares the values of tensors and takes a snapshot. The state may change afterwards.
  void take_snapshot(const Communicator& communicator) { state_.take_snapshot(communicator, last_.snapshot); }
  /// Writes state.h5. Without a snapshot it also compares the values of tensors.
  void write(const Communicator& communicator);
  /// Writes the manifest and gives the checkpoint its published name. Called after write() has ended on all ranks.
  void publish(const Communicator& communicator);
  /// Does some of these steps. If they fail, removes what this rank is responsible for of the checkpoint.
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
  /// Return the pieces of state.h5 and the user's files that `rank` has written.
  std::vector<std::uint64_t> pieces_of(int rank) const { return state_.pieces_of(rank); }
  std::vector<std::string> files_of(int rank) const;

 private:
  /// Creates the checkpoint's hidden folder, once.
  void open(const Communicator& communicator);
  void copy_files(const Communicator& communicator);
  Manifest make_manifest() const;

  CheckpointContents contents_;
  const int index_;
  const SaveTarget target_;
  LastSave& last_;
  StateSave state_;
  std::vector<UserFiles> files_;                           // one element per rank
  std::vector<std::vector<FileEntry>> copied_files_ = {};  // one element per rank
  bool opened_ = false;
  Manifest manifest_ = {};
};

}  // namespace muster::detail::checkpoint
