// Checkpoints as a person and as a script read them.
#pragma once

#include <muster/checkpoint.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool {

/// A table of them, and what is wrong with those that are damaged.
std::string checkpoints_text(const std::vector<CheckpointInfo>& checkpoints);
Json to_json(const CheckpointInfo& info);

bool is_checkpoint(const std::filesystem::path& folder);
bool is_run(const std::filesystem::path& folder);

}  // namespace muster::tool
