// The fast tier: a folder on each node's local disk or in its memory. Checkpoints are committed there first and then
// copied to the run's folder.
//
// Each node holds the parts that its own ranks wrote, and the manifest, which is the same on all nodes:
//   FOLDER/muster-ID-NODE-HOST/checkpoint_000003/   state.h5 with holes, the user's files, manifest.json
// fast_tier_note.hpp describes how the run's folder remembers the tiers of its jobs.
#pragma once

#include "checkpoint/save.hpp"
#include "muster/communicator.hpp"
#include "storage/tier.hpp"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// A save's way through this job's fast tier, if the job has one, and the end of earlier jobs' tiers. Unless they say
/// otherwise, member functions are collective.
class FastTiers {
 public:
  /// Finishes copying from the tiers of earlier jobs to the run's folder, which is the tier `run`.
  FastTiers(const Communicator& communicator, std::shared_ptr<storage::Tier> run);
  FastTiers(const FastTiers&) = delete;
  FastTiers& operator=(const FastTiers&) = delete;
  /// Removes this job's tier, unless it holds a checkpoint that the next start must copy. Not collective.
  ~FastTiers();

  /// Gives this job a tier: adds it to the note and creates this node's folder in `place`. Gives it none if the note
  /// belongs to another user.
  void create_own(const Communicator& communicator, const std::filesystem::path& place);
  /// Where the ranks of this node save; none without a tier of this job. Not collective.
  const std::optional<SaveTarget>& own() const noexcept { return own_; }

  /// Notes that the tier is in use, before the checkpoint with this index is published in it.
  void begin_use(const Communicator& communicator, int index);
  /// Copies the published checkpoint from the tier to the run's folder, if it is not there already, and removes from
  /// all tiers what is not needed any more.
  void settle(const Communicator& communicator, const Save& save);
  /// Removes the earlier jobs' tiers whose checkpoints are not wanted any more.
  void release_earlier(const Communicator& communicator);

 private:
  void copy(const Communicator& communicator, const Save& save);
  /// Notes that no tier is needed any more, and removes the tiers of earlier jobs.
  void release(const Communicator& communicator);
  /// Removes from this node's folder all checkpoints older than `index` except `first_`, or all of them if `after`. Not
  /// collective.
  void clear(int index, bool after) const noexcept;

  std::shared_ptr<storage::Tier> run_;
  bool has_earlier_ = false;  // an earlier job's tier may hold a checkpoint that could not be copied
  std::optional<SaveTarget> own_ = {};
  bool is_root_ = false;
  bool used_ = false;  // "used" is set in the note
  int first_ = 0;      // "first" in the note
};

/// Returns the IDs of the tiers in use. Called by one rank.
std::vector<std::string> used_tiers(const storage::Tier& run);
/// True if a fast tier may hold a checkpoint that is not in the run's folder. Not collective.
bool may_hold_newer(const storage::Tier& run);

}  // namespace muster::detail::checkpoint
