// The checkpoints of a run: committed by all ranks together, found again, pruned. This is the protocol; what a
// checkpoint consists of is files/, where it lies is the tier.
#pragma once

#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/save.hpp"
#include "checkpoint/state/replication.hpp"
#include "checkpoint/state/trainer_state.hpp"
#include "checkpoint/tier.hpp"
#include "muster/checkpoint.hpp"
#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/state.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

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

/// All member functions are collective over the communicator and end alike on every rank, unless they say otherwise.
class Store {
 public:
  enum class When { now, behind };

  /// `run` exists. Removes what an interrupted save left behind, and finishes what was left to copy in a fast tier.
  Store(Communicator communicator, std::filesystem::path run, CheckpointConfig config);
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  /// What is still being written is finished first.
  ~Store();

  /// Compares what the ranks hold, writes, agrees, publishes, prunes. If any rank fails, nothing is published or lost.
  /// When::behind, with async_save: returns when `contents` are copied, and gives the checkpoint that it will be; a
  /// thread of each rank does the rest. So it goes from a fast tier to the run's folder in any case. Not before
  /// finish(), if something is still behind.
  Checkpoint commit(Contents contents, When when = When::now);
  /// Whether something is, on this rank. Not collective.
  bool busy() const;
  /// Waits for it; whether it has ended well, which is the same on all ranks. finish() still tells. Not collective.
  bool ends_well() const;
  /// Waits for it; gives the error that it ended with. Nothing is published or lost then, and its index is used up.
  std::optional<Error> finish();
  /// Of the first rank: asked of a checkpoint's report before it is pruned, which it is not where that is so. From the
  /// thread that writes. Not collective.
  void keep_while(std::function<bool(std::int64_t training_iteration)> needed) { needed_ = std::move(needed); }
  /// How long the last save has taken to its end, and the one that is behind until now. Not collective.
  std::optional<Clock::duration> cost() const noexcept { return cost_; }
  std::optional<Clock::duration> under_way() const noexcept;

  /// The newest whole one; nullopt if there is none at all, an Error (ExitCode::data) if all are damaged. Damaged ones
  /// are renamed to ….damaged with a warning; first, those newer than all others that are whole again get their names
  /// back. Only content is damage: a file missing, of another size, with a wrong checksum, an impossible manifest. What
  /// cannot be read, or is not the same to all ranks, is an Error (ExitCode::retry), and nothing is renamed.
  std::optional<Checkpoint> newest();

  /// Rolls back to that checkpoint, once: newest() gives it, and passes over those that are newer, until one newer than
  /// all of them is committed. Nothing is written before confirm_rollback(). An Error (ExitCode::data) if the
  /// checkpoint is not there or not whole. `name`: how it was asked for.
  void roll_back(int index, const std::string& name = {});
  /// The run has taken up the checkpoint to which it was rolled back: notes that in its folder. commit() does so too.
  void confirm_rollback();
  /// The rollbacks of the run, with the one that is not confirmed yet. Not collective; for rank 0.
  std::vector<Rollback> rollbacks() const;
  /// Whether the last rollback was asked for by that name, wherever that leads now. Not collective; for rank 0.
  bool has_rolled_back(const std::string& name) const;

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
  /// A name of a checkpoint that is rolled back, or has been set aside, goes to the newest other one that had it, or is
  /// removed. Not collective.
  void move_names(std::optional<int> set_aside = {}) const;
  void say_rolled_back(int index) const;
  void copy_from_own_tier(const Communicator& communicator, const Save& save, int index);
  void go_on_behind(std::function<void(const Communicator&)> work);
  /// Nothing in a fast tier is needed any more: notes that, and removes what earlier jobs have left in theirs.
  void give_up_tiers(const Communicator& communicator);
  /// The fast tier keeps none older than that one, or none at all after it.
  void clear_fast_tier(int index, bool after) const noexcept;  // not collective

  Communicator communicator_;
  Tier tier_;
  std::optional<Place> fast_ = {};
  bool fast_used_ = false;                   // which the run's folder says
  bool has_earlier_tier_ = false;            // of which the newest could not be copied
  std::optional<Communicator> behind_ = {};  // for the thread that writes
  Layout layout_ = {};                       // of the last save
  StateWriter writer_;
  Snapshot snapshot_;
  CheckpointConfig config_;
  std::function<bool(std::int64_t)> needed_ = {};
  int next_index_ = 0;
  std::optional<Rollback> rollback_ = {};  // not confirmed
  /// What was found whole last, for whoever reads it next.
  struct Verified {
    std::filesystem::path path = {};
    Manifest manifest = {};
    std::shared_ptr<const MappedState> state = {};
  };
  mutable Verified verified_;
  Clock::time_point begun_ = {}, ended_ = {};  // the save that is behind, or was last
  std::optional<Clock::duration> cost_ = {};
  std::shared_future<std::optional<Error>> writing_;  // last: it uses the others
};

}  // namespace muster::detail::checkpoint
