// Copies checkpoints from fast tiers (fast_tier.hpp) to the run's folder, and removes the fast tiers of earlier jobs.
// `run` is always the tier of the run's folder. All functions are collective.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "muster/communicator.hpp"
#include "storage/tier.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// What one rank copies from one folder of a fast tier.
struct CopySource {
  std::filesystem::path checkpoint;        ///< the checkpoint's folder in the fast tier
  std::vector<std::uint64_t> pieces = {};  ///< indices of pieces of state.h5
  std::vector<std::string> files = {};     ///< names of the user's files
};

/// Each rank copies its parts of a checkpoint (`mine`) to the run's folder and verifies them meanwhile; then the
/// checkpoint is published there. Throws an Error (ExitCode::data) if a part does not match the manifest.
void copy_to_run_folder(const Communicator& communicator, const Manifest& manifest, const std::vector<CopySource>& mine,
                        storage::Tier& run);

/// Finishes the copies of earlier jobs: copies from each fast tier the newest checkpoint that the present nodes hold
/// whole, unless the run's folder has one at least as new, and removes the tier. If a newer one may be in the tier but
/// cannot be copied now, it warns and keeps the tier. If the run's folder is a copy of another run's, it takes only the
/// checkpoint NotedTier::first from that run's tiers, and removes none of them. Tiers that were rolled back
/// (Rollback::tiers) are removed unread. Returns true if a tier may still hold a newer checkpoint. If the note
/// (fast_tier_note.hpp) belongs to another user, it only warns and returns false.
bool finish_copying(const Communicator& communicator, storage::Tier& run);

/// Removes all fast tiers that the note does not mark as used, except this job's own tier and the tiers of another run.
/// `own`: this node's folder of this job's tier; empty if this job has none.
void remove_unused_tiers(const Communicator& communicator, const storage::Tier& run,
                         const std::filesystem::path& own = {});

}  // namespace muster::detail::checkpoint
