// One save, by its steps: what the ranks hold is compared, written by all, and published.
//
//   save.prepare(communicator);                       save.prepare(communicator);
//   save.copy_files(communicator, place);             save.copy_files(communicator, place);
//   save.write(communicator, place);                  save.copy(communicator, snapshot);
//   save.publish(communicator, place);                … and on another thread, over another communicator, the same rest
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/snapshot.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/user_files.hpp"
#include "checkpoint/state/replication.hpp"
#include "checkpoint/tier.hpp"
#include "muster/communicator.hpp"
#include "muster/state.hpp"
#include "optim/frozen.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

using Clock = std::chrono::steady_clock;

/// What one checkpoint is made of.
struct Contents {
  Clock::time_point begun = Clock::now();               ///< to be put together
  StateDict state = {};                                 ///< the same names and shapes on all ranks
  EntryReplication replication = {};                    ///< which entries need not have equal values
  std::string random_state = {};                        ///< this rank's, bytes; as long on every rank
  std::optional<std::filesystem::path> directory = {};  ///< the user's files on this rank
  Json progress = Json::object();                ///< training_iteration, epoch, position, seed … as the session wants
  Json metrics = Json::object();                 ///< of the report; the score is looked up here
  Json metadata = Json::object();                ///< the trainer's; what the user has set on the files' checkpoint wins
  std::vector<optim::FrozenMemory> frozen = {};  ///< what of the state need not be copied
};

/// Where a checkpoint is written.
struct Place {
  Tier tier;
  bool leads = false;      ///< this rank makes the folder, and publishes it: rank 0, or the first of each node
  bool of_a_node = false;  ///< each node has a folder of its own, for what its ranks write

  /// Nothing is left of it: not of what is unfinished, nor of what this node has published and another could not.
  void abandon(int index) const noexcept;
};

/// All member functions are collective.
class Save {
 public:
  Save(Contents contents, int index, const Communicator& ranks, StateWriter& writer);

  /// Compares what each rank has, but for the numbers in its tensors; lays the file out, and brings to each writer what
  /// other ranks have of their own. `last`: the layout of the save before, the same on all ranks, or an empty one; it
  /// becomes that of this one.
  void prepare(const Communicator& communicator, Layout& last);
  /// The user's files go there.
  void copy_files(const Communicator& communicator, Place& place);
  /// Compares the numbers, and takes a snapshot: the state may change from now on.
  void copy(const Communicator& communicator, Snapshot& snapshot);
  /// Those that the plan names write. What has not been copied is compared meanwhile: rank 0's is what is stored of a
  /// tensor that has drifted.
  void write(const Communicator& communicator, Place& place);
  /// All have written: the checkpoint gets its manifest and its name.
  void publish(const Communicator& communicator, Place& place);

  /// What is published.
  const Manifest& manifest() const noexcept { return manifest_; }
  /// Pieces of state.h5, and the user's files, that this rank has written.
  std::vector<std::uint64_t> pieces() const { return pieces_of(writers_, rank_); }
  std::vector<std::string> files() const;

 private:
  void open(const Communicator& communicator, Place& place);
  void compare(const Communicator& communicator);
  /// What is rank 0's after all.
  void find_drift(const Communicator& communicator);
  void write_drifted(const Communicator& communicator, const std::filesystem::path& path);
  std::vector<std::uint64_t> drifted_pieces() const;
  void give_drifted_to_rank_0(const Communicator& communicator);
  Manifest make_manifest() const;
  /// All files with the checksums that their writers took.
  std::vector<FileEntry> entries() const;

  Contents contents_;
  const int index_;
  const int rank_, ranks_;
  StateWriter& writer_;
  Tensors tensors_;                               // with the random state
  std::set<std::string> per_rank_;                // of these
  Json values_;                                   // as they are stored
  std::vector<UserFiles> files_;                  // of each rank
  std::optional<std::set<std::string>> drifted_;  // tensors, where anything is not alike
  bool opened_ = false, copied_ = false;
  Layout layout_;
  std::vector<int> writers_;                          // of each piece of state.h5
  std::vector<Stretch> rows_;                         // other ranks' own that this one writes
  std::vector<std::vector<FileEntry>> copied_files_;  // by each rank
  std::vector<std::uint32_t> checksums_;              // of each piece; rank 0's count
  Manifest manifest_;
};

}  // namespace muster::detail::checkpoint
