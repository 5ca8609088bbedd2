// The fast tier: a folder on each node, on its local disk or in its memory. Checkpoints are committed there first and
// then copied to the run's folder.
//
// Each node's folder holds the parts that the node's ranks have written, and the manifest, which is the same on all
// nodes:
//   FOLDER/muster-ID-NODE-HOST/checkpoint_000003/   state.h5 with holes, the user's files, manifest.json
// The note, a file in the run's folder, lists the tiers of the run's jobs (fast_tier_note.hpp).
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

/// Copies checkpoints from this job's fast tier, if it has one, to the run's folder. Also copies what is left in the
/// tiers of earlier jobs, and removes these tiers. Member functions are collective unless they say otherwise.
class FastTiers {
 public:
  /// Copies from earlier jobs' tiers with finish_copying(). `run`: the tier of the run's folder.
  FastTiers(const Communicator& communicator, std::shared_ptr<storage::Tier> run);
  FastTiers(const FastTiers&) = delete;
  FastTiers& operator=(const FastTiers&) = delete;
  /// Removes this job's tier, unless it holds a checkpoint that the next start must copy. Not collective.
  ~FastTiers();

  /// Makes a fast tier for this job: adds it to the note and creates this node's folder in `place`. Does nothing if the
  /// note belongs to another user.
  void create_own(const Communicator& communicator, const std::filesystem::path& place);
  /// Where the ranks of this node save; none if this job has no fast tier. Not collective.
  const std::optional<SaveTarget>& own() const noexcept { return own_; }

  /// Records in the note that this job's tier is in use. Called before checkpoint `index` is published in the tier.
  void begin_use(const Communicator& communicator, int index);
  /// Called when a checkpoint is published. Copies it from the fast tier to the run's folder, if there is a fast tier,
  /// and removes from all tiers what is no longer needed.
  void settle(const Communicator& communicator, const Save& save);
  /// Called after a rollback, when no checkpoint of the earlier jobs' tiers is wanted any more: removes these tiers.
  void release_earlier(const Communicator& communicator);

 private:
  void copy(const Communicator& communicator, const Save& save);
  /// Records in the note that no tier is needed any more, and removes the tiers of earlier jobs.
  void release(const Communicator& communicator);
  /// Removes checkpoints from this node's folder: all of them if `all` is true, otherwise the ones older than `index`,
  /// except `first_`. Not collective.
  void clear(int index, bool all) const noexcept;

  std::shared_ptr<storage::Tier> run_;
  bool has_earlier_ = false;  // true if a tier of an earlier job may hold a checkpoint that could not be copied
  std::optional<SaveTarget> own_ = {};
  bool is_root_ = false;
  bool used_ = false;  // true if the note's entry of this job's tier says "used"
  int first_ = 0;      // "first" in that entry
};

/// Returns the IDs of the tiers that the note says are in use. Not collective.
std::vector<std::string> used_tiers(const storage::Tier& run);
/// True if a fast tier may hold a checkpoint that is not in the run's folder. Not collective.
bool may_hold_newer(const storage::Tier& run);

}  // namespace muster::detail::checkpoint
