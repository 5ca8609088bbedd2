// Copies checkpoints from fast tiers to the run's folder, and removes the tiers of earlier jobs. `run` is the tier of
// the run's folder. All functions are collective.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "muster/communicator.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <filesystem>
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
void copy_to_run_folder(const Communicator& communicator, const Manifest& manifest, const std::vector<CopySource>& mine,
                        storage::Tier& run);

/// Finishes the copying of interrupted jobs. From each tier it copies the newest checkpoint that is complete on the
/// present nodes, unless the run's folder has one at least as new. Then it removes the tier. If a tier may hold a newer
/// checkpoint that cannot be copied now, that tier stays, with a warning. A tier that was rolled back is removed
/// without being read. Returns true if a tier stays.
bool finish_copying(const Communicator& communicator, storage::Tier& run);

/// Removes the tiers that are not in use, except this job's tier. `own`: this node's folder of it, if there is one.
void remove_unused_tiers(const Communicator& communicator, const storage::Tier& run,
                         const std::filesystem::path& own = {});

}  // namespace muster::detail::checkpoint
