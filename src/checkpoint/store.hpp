// The checkpoints of a run: committed by all ranks together, found again, pruned. This is the protocol; what a
// checkpoint consists of is files/, where it lies is the tier.
#pragma once

#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/state/replication.hpp"
#include "checkpoint/state/trainer_state.hpp"
#include "checkpoint/tier.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/state.hpp"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::checkpoint {

/// What one checkpoint is made of.
struct Contents {
  StateDict state = {};                                 ///< the same names and shapes on all ranks
  EntryReplication replication = {};                    ///< which entries need not have equal values
  std::string random_state = {};                        ///< this rank's, bytes; as long on every rank
  std::optional<std::filesystem::path> directory = {};  ///< the user's files on this rank
  Json progress = Json::object();  ///< training_iteration, epoch, position, seed … as the session wants
  Json metrics = Json::object();   ///< of the report; the score is looked up here
  Json metadata = Json::object();  ///< the trainer's; what the user has set on the files' checkpoint wins
};

/// What a checkpoint gives back.
struct Restored {
  StateDict state;                          ///< on the CPU
  std::optional<std::string> random_state;  ///< this rank's; none at another world size
  std::string random_states;                ///< of all ranks that saved, one after the other
  Json progress;
  TrainerState trainer;  ///< the same, checked
  Json metrics;
  int world_size = 1;
};

/// All member functions are collective over the communicator and end alike on every rank.
class Store {
 public:
  /// `run` exists. Removes what an interrupted save left behind.
  Store(Communicator communicator, std::filesystem::path run, CheckpointConfig config);

  /// Compares what the ranks hold, writes, agrees, publishes, prunes. If any rank fails, nothing is published or lost.
  Checkpoint commit(const Contents& contents);

  /// The newest whole one; nullopt if there is none at all, an Error (ExitCode::data) if all are damaged. Damaged ones
  /// are renamed to ….damaged with a warning; first, those newer than all others that are whole again get their names
  /// back. Only content is damage: a file missing, of another size, with a wrong checksum, an impossible manifest. What
  /// cannot be read, or is not the same to all ranks, is an Error (ExitCode::retry), and nothing is renamed.
  std::optional<Checkpoint> newest();

  /// Rolls back to that checkpoint, once: newest() then passes over those that are newer, until one newer than all of
  /// them is committed. An Error (ExitCode::data) if it is not there or not whole.
  void roll_back(int index);

  /// Verified, unless newest() has just done so, and read; one that no run has made by merge_entries(). Tensors may be
  /// views of the file, which takes space until they are gone. A directory that is not muster's gives nothing.
  Restored read(const Checkpoint& checkpoint) const;

  /// The same handle as this rank's: load() through per_rank gives what this rank saved. Not collective.
  Checkpoint as_this_rank(Checkpoint checkpoint) const;

 private:
  Rank here() const noexcept { return {communicator_.rank(), communicator_.size()}; }
  /// What is wrong with the content of the checkpoint; empty if nothing is. Each rank recomputes its share of the
  /// checksums, and its node has then read what all ranks need. An Error (ExitCode::retry) if it cannot be read, or if
  /// not all ranks see the same files.
  std::string problem_of(const std::filesystem::path& checkpoint) const;
  void take_back_what_is_whole() const;
  void prune() const noexcept;  // not collective

  Communicator communicator_;
  Tier tier_;
  StateWriter writer_;
  CheckpointConfig config_;
  int next_index_ = 0;
  /// What was found whole last, for whoever reads it next.
  struct Verified {
    std::filesystem::path path = {};
    Manifest manifest = {};
    std::shared_ptr<const MappedState> state = {};
  };
  mutable Verified verified_;
};

}  // namespace muster::detail::checkpoint
