// The steps of one save: compare the state of all ranks, write it, publish it.
//
//   Synchronous:                                      Asynchronous:
//   save.prepare(communicator);                       save.prepare(communicator);
//   save.copy_files(communicator, target);            save.copy_files(communicator, target);
//   save.write(communicator, target);                 save.take_snapshot(communicator, snapshot);
//   save.publish(communicator, target);                … then write() and publish() on another thread, over another
//                                                     communicator
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/snapshot.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/user_files.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "optim/memory_snapshot.hpp"
#include "state/replication.hpp"
#include "storage/tier.hpp"

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
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

  /// Removes what this rank is responsible for of the checkpoint, which will not be published.
  void abandon(int index) const noexcept {
    if (is_leader) tier->abandon(index);
  }
};

/// One save. All member functions are collective, except the getters. Many members, since they hold what the calls find
/// out about all ranks for the calls after them.
class Save {
 public:
  Save(CheckpointContents contents, int index, const Communicator& ranks, StateWriter& writer);

  /// Compares names, shapes and JSON values between ranks, but not the values of tensors; lays the file out; and sends
  /// per-rank tensors to the ranks that write them. `last`: the layout of the previous save, the same on all ranks, or
  /// an empty one; it is replaced by this save's layout.
  void prepare(const Communicator& communicator, Layout& last);
  /// Copies the user's files.
  void copy_files(const Communicator& communicator, SaveTarget& target);
  /// Compares the values of tensors and takes a snapshot. The state may change afterwards.
  void take_snapshot(const Communicator& communicator, Snapshot& snapshot);
  /// Writes state.h5, each piece by the rank that the plan names. Without a snapshot it also compares the values of
  /// tensors, while it waits for the disk. Of a tensor that has drifted, rank 0's copy is stored.
  void write(const Communicator& communicator, SaveTarget& target);
  /// Writes the manifest and gives the checkpoint its published name. Called after write() has ended on all ranks.
  void publish(const Communicator& communicator, SaveTarget& target);

  int index() const noexcept { return index_; }
  /// Returns the published manifest.
  const Manifest& manifest() const noexcept { return manifest_; }
  /// Return the pieces of state.h5 and the user's files that this rank has written.
  std::vector<std::uint64_t> pieces() const { return pieces_of(writers_, rank_); }
  std::vector<std::string> files() const;

 private:
  void open(const Communicator& communicator, SaveTarget& target);
  void compare(const Communicator& communicator);
  /// Finds the tensors that have drifted, once; see checkpoint::find_drift().
  void find_drift(const Communicator& communicator);
  void write_drifted(const Communicator& communicator, const OpenFile& open);
  std::vector<std::uint64_t> drifted_pieces() const;
  void give_drifted_to_rank_0(const Communicator& communicator);
  Manifest make_manifest() const;
  /// Returns the entries of all files, with the checksums that their writers computed.
  std::vector<FileEntry> entries() const;

  CheckpointContents contents_;
  const int index_;
  const int rank_, ranks_;
  StateWriter& writer_;
  Tensors tensors_;                               // includes the random state
  std::set<std::string> per_rank_;                // names of the per-rank tensors
  Json values_;                                   // as stored, gathered from all ranks
  std::vector<UserFiles> files_;                  // one element per rank
  std::optional<std::set<std::string>> drifted_;  // names of tensors; set once ranks were found to differ
  bool opened_ = false, copied_ = false;
  Layout layout_;
  std::vector<int> writers_;                          // for each piece of state.h5, the rank that writes it
  std::vector<FileBytes> rows_;                       // bytes of per-rank tensors that this rank writes
  std::vector<std::vector<FileEntry>> copied_files_;  // one element per rank
  std::vector<std::uint32_t> checksums_;              // one per piece; only rank 0's are stored
  Manifest manifest_;
};

}  // namespace muster::detail::checkpoint
