// The fast tier: a folder on each node's local disk or in its memory. Checkpoints are committed there first and then
// copied to the run's folder.
//
// Each node holds the parts that its own ranks wrote, and the manifest, which is the same on all nodes:
//   FOLDER/muster-ID-NODE-HOST/checkpoint_000003/   state.h5 with holes, the user's files, manifest.json
// The note, fast_tier.json in the run's folder, lists the tiers. Only its owner may read it:
//   [{"folder": FOLDER, "id": ID, "hosts": ["n1", …], "used": true, "first": 3, "run": "INODE BIRTH"}, …]
// Oldest first; this job's tier is the last. Each start has its own tier with a random ID, so nobody can guess the
// folder's name. "used" is set before the first checkpoint is published in the tier. "first" is the index of the oldest
// checkpoint in the tier: that one, until a newer checkpoint has replaced it. "used" is cleared once the run's folder
// has a checkpoint at least as new. While a tier is in use, its entry in the note and its folders on the nodes stay, so
// a later start can still read a node that was missing. When it is not in use any more, its folders are removed; its
// entry stays until that is done on every node. Only files of this user are trusted: another user's note or folder is
// left alone, with a warning. In a copy of the run's folder INODE and BIRTH do not match. Such a copy takes only the
// checkpoint "first", the next one at the time of copying; it neither uses nor removes the tier.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/save.hpp"
#include "muster/communicator.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// What one rank copies from one folder of a tier.
struct CopySource {
  std::filesystem::path checkpoint;
  std::vector<std::uint64_t> pieces = {};  ///< indices of pieces of state.h5
  std::vector<std::string> files = {};     ///< names of the user's files
};

/// Copies the parts of all ranks to the run's folder, verifies them while copying, and publishes the checkpoint there.
/// `mine`: the parts that this rank copies. Throws an Error (ExitCode::data) if they do not match the manifest.
/// Collective.
void copy_to_run_folder(const Communicator& communicator, const Manifest& manifest, const std::vector<CopySource>& mine,
                        storage::Tier& run);

/// Finishes the copying of interrupted jobs. From each tier it copies the newest checkpoint that is complete on the
/// present nodes, unless the run's folder has one at least as new. Then it removes the tier. If a tier may hold a newer
/// checkpoint that cannot be copied now, that tier stays, with a warning. A tier that was rolled back is removed
/// without being read. Returns true if a tier stays. Collective.
bool finish_copying(const Communicator& communicator, storage::Tier& run);

/// Adds a new tier to the note and creates this node's folder in `folder`. Returns none if the note belongs to another
/// user. Collective.
std::optional<SaveTarget> create_fast_tier(const Communicator& communicator, const storage::Tier& run,
                                           const std::filesystem::path& folder);

/// Returns the IDs of the tiers in use. Called by one rank.
std::vector<std::string> used_tiers(const storage::Tier& run);
/// Sets "used" of this job's tier, before the checkpoint with this index is published in it. Called by one rank.
void mark_used(const storage::Tier& run, int index);
/// Sets "first" of this job's tier, before the older checkpoints are removed from it. Returns false, after a warning,
/// if that fails: then the checkpoint "first" must stay. Called by one rank.
bool note_first(const storage::Tier& run, int index) noexcept;
/// Clears "used" of all tiers: the run's folder has a checkpoint at least as new as theirs. Returns false, after a
/// warning, if that fails. Called by one rank.
bool mark_copied(const storage::Tier& run) noexcept;
/// Removes the tiers that are not in use, except `own`, this job's tier. Collective.
void remove_unused_tiers(const Communicator& communicator, const storage::Tier& run,
                         const std::optional<SaveTarget>& own);
/// Removes this job's tier from the note. Called by one rank, when the tier is not in use.
void remove_from_note(const storage::Tier& run, const SaveTarget& own) noexcept;

/// True if a fast tier may hold a checkpoint that is not in the run's folder. Not collective.
bool may_hold_newer(const storage::Tier& run);

}  // namespace muster::detail::checkpoint
