// Checkpoints as a person and as a script read them.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool {

/// A table of them, and what is wrong with those that are damaged.
std::string checkpoints_text(const std::vector<CheckpointInfo>& checkpoints);
Json to_json(const CheckpointInfo& info);

/// False where nothing is at `path`, or a file; an Error (ExitCode::data) if that cannot be seen.
bool is_folder(const std::filesystem::path& path);
bool is_checkpoint(const std::filesystem::path& folder);
bool is_run(const std::filesystem::path& folder);

/// list_checkpoints(), and a warning of those that are links, which are left out.
std::vector<CheckpointInfo> checkpoints_of(const std::filesystem::path& run);
/// An Error (ExitCode::usage) if `output` lies in a checkpoint or a run: they are records, and nobody else writes
/// there.
void require_outside_records(const std::filesystem::path& output);

}  // namespace muster::tool
