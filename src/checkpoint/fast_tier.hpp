// A folder on each node's own disk or in its memory, where checkpoints are whole before they are copied to the run's.
//
// Each node has there what its own ranks have written, and the manifest, which is the same on all:
//   FOLDER/muster-ID-NODE-HOST/checkpoint_000003/   state.h5 with holes, the user's files, manifest.json
// The run's folder has fast_tier.json, which only its owner may read:
//   [{"folder": FOLDER, "id": ID, "hosts": ["n1", …], "used": true, "first": 3, "run": "INODE BIRTH"}, …]
// oldest first, this job's last. The random ID tells the tiers of different starts apart, and nobody can guess the
// folder's name. "used" is written before a checkpoint is published in the tier, with its index as "first", and taken
// back when the run's folder has a checkpoint as new. As long as a tier is in use it stays in the note, and its folders
// on the nodes: a node that comes back is asked again.
// Only what belongs to this user is believed: another user's note or folder is left alone with a warning. In a copy of
// the run's folder INODE and BIRTH do not fit: a copy takes the checkpoint "first", which came next when the folder was
// copied, and neither uses nor removes the tier.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/save.hpp"
#include "checkpoint/tier.hpp"
#include "muster/communicator.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// What one rank copies from one folder of a tier.
struct Part {
  std::filesystem::path checkpoint;
  std::vector<std::uint64_t> pieces = {};  ///< of state.h5
  std::vector<std::string> files = {};     ///< the user's
};

/// Copies the parts of all ranks to the run's folder, verifies them on the way, and publishes the checkpoint there. An
/// Error (ExitCode::data) if they are not what the manifest says. Collective.
void copy_to_run(const Communicator& communicator, const Manifest& manifest, const std::vector<Part>& mine, Tier& run);

/// Finishes what an interrupted job has left to copy: of each tier the newest checkpoint of which all can be had from
/// the nodes that are here, unless the run's folder has one as new. Then the tier is removed. Where a newer one may be
/// in a tier and cannot be had now, that tier stays, with a warning, and the result is true. Collective.
bool finish_copying(const Communicator& communicator, Tier& run);

/// Makes the folder of this node in `folder`, and notes the tier in the run's folder. None where another user's note is
/// in the way. Collective.
std::optional<Place> make_fast_place(const Communicator& communicator, const Tier& run,
                                     const std::filesystem::path& folder);

/// Notes that the checkpoint of that index is about to be published in this job's tier. By one rank.
void note_use(const Tier& run, int index);
/// Notes that the run's folder has a checkpoint newer than those in any tier; a failure is a warning, and gives false.
/// By one rank.
bool note_copied(const Tier& run) noexcept;
/// Removes the tiers that are not in use, but for this job's own. Collective.
void remove_unused(const Communicator& communicator, const Tier& run, const std::optional<Place>& own);
/// Takes this job's tier out of the note. By one rank, when the tier is not in use.
void forget(const Tier& run, const Place& own) noexcept;

/// Whether there may be a checkpoint in a fast tier that is not in the run's folder. Not collective.
bool may_have_more(const Tier& run);

}  // namespace muster::detail::checkpoint
