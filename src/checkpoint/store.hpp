// The checkpoints of a run: committed by all ranks together, found again, pruned.
#pragma once

#include "checkpoint/copies.hpp"
#include "checkpoint/progress.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/state.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// What one checkpoint is made of.
struct Contents {
  StateDict state = {};                                 ///< the same names and shapes on all ranks
  EntryCopies copies = {};                              ///< which entries need not have equal values
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
  Progress where;  ///< the same, checked
  Json metrics;
  int world_size = 1;
};

/// All member functions are collective over the communicator and end alike on every rank.
class Store {
 public:
  /// `run` exists. Removes what an interrupted save left behind.
  Store(Communicator communicator, std::filesystem::path run, CheckpointConfig config);

  /// The newest whole one. Walks back over damaged ones: each is renamed to ….damaged with a warning that says what is
  /// wrong; first, those newer than all others that are whole again get their names back. None at all is nullopt; some,
  /// all of them damaged, is an Error (ExitCode::data). Only content is damage: a file missing, of another size, with a
  /// wrong checksum or a manifest that cannot be. What cannot be read, or is not the same to all ranks, is an Error
  /// (ExitCode::retry), and nothing is renamed.
  std::optional<Checkpoint> newest();

  /// Goes back to that checkpoint of the run: newest() then passes over those that are newer, until a newer one than
  /// all of them is committed. Once: nothing if that was the last step back already. An Error (ExitCode::data) if it is
  /// not there or not whole.
  void step_back(int index);

  /// Compares the ranks' copies, then writes, agrees, publishes, prunes. If any rank fails, all raise the same Error,
  /// nothing is published and what was there before stays.
  Checkpoint commit(const Contents& contents);

  /// The same handle as this rank's: what it loads through per_rank is this rank's part.
  Checkpoint handed_out(Checkpoint checkpoint) const;

  /// Verified and read. One that no run has made may be each rank's own; its entries come as united_entries() gives
  /// them. A directory that is not muster's gives nothing.
  Restored read(const Checkpoint& checkpoint) const;

  /// All on disk, oldest first.
  std::vector<CheckpointInfo> list() const;

 private:
  void take_back_what_is_whole();
  void prune() const noexcept;

  Communicator communicator_;
  std::filesystem::path run_;
  CheckpointConfig config_;
  int next_index_ = 0;
};

}  // namespace muster::detail::checkpoint
