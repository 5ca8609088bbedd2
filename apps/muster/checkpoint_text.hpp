// Describes checkpoints, for people and for scripts.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool {

/// Returns a table of checkpoints and the problems of damaged ones. `verified`: true if their checksums were
/// recomputed. If false, only their manifests were read, and a second table has their metrics.
std::string checkpoints_text(const std::vector<CheckpointInfo>& checkpoints, bool verified);
Json to_json(const CheckpointInfo& info, bool verified);

/// True if `path` is a folder; throws an Error (ExitCode::data) if this cannot be determined.
bool is_folder(const std::filesystem::path& path);
bool is_checkpoint(const std::filesystem::path& folder);
bool is_run(const std::filesystem::path& folder);
bool is_sweep(const std::filesystem::path& folder);

/// Like list_checkpoints(); also warns on stderr of the symbolic links that it leaves out.
std::vector<CheckpointInfo> checkpoints_of(const std::filesystem::path& run);
/// Throws an Error (ExitCode::usage) if `output` is inside a checkpoint or a run, since only training may write there.
void require_outside_records(const std::filesystem::path& output);

}  // namespace muster::tool
