// A folder on each node's own disk or in its memory, where checkpoints are whole before they are copied to the run's.
//
// Each node has there what its own ranks have written, and the manifest, which is the same on all:
//   FOLDER/muster-ID-HOST/checkpoint_000003/   state.h5 with holes, the user's files, manifest.json, and
//     .share.json                              {"pieces": [0, 1, …], "files": ["notes/a.txt", …]}: what is here
// The run's folder has fast_tier.json, {"folder": FOLDER, "id": ID, "used": true}: so that nothing is taken up that
// another run of that name had left, nobody can guess the folder's name, and what is left on a node that comes back too
// late is not found. It says "used" before the first checkpoint is published there, for those who do not see the nodes.
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

/// What of a checkpoint lies on one node.
struct NodeShare {
  std::vector<std::uint64_t> pieces = {};  ///< of state.h5
  std::vector<std::string> files = {};     ///< the user's
};
void write_share(const std::filesystem::path& checkpoint, const NodeShare& share);

/// Copies these pieces and files of a checkpoint, each on one rank, to the run's folder, verifies them on the way, and
/// publishes it there. An Error (ExitCode::data) if they are not what the manifest says. Collective.
void copy_to_run(const Communicator& communicator, const std::filesystem::path& checkpoint, const Manifest& manifest,
                 const NodeShare& mine, Tier& run);

/// Finishes what an interrupted job has left to copy: the newest of which all can be had from the nodes that are here,
/// unless the run's folder has one as new. What is left then goes. Collective.
void finish_copying(const Communicator& communicator, Tier& run);

/// Says in the run's folder that there is one. By one rank.
void note_use(const Tier& run);
/// Whether there may be a checkpoint in the fast tier that is not in the run's folder, as that says. Not collective.
bool may_have_more(const Tier& run);

/// The folder of this run and node in `folder`, made anew. Collective.
Place make_fast_place(const Communicator& communicator, const Tier& run, const std::filesystem::path& folder);

}  // namespace muster::detail::checkpoint
