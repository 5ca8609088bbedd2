#include "checkpoint_text.hpp"

#include "text.hpp"

#include <algorithm>

namespace muster::tool {
namespace {

/// The folder's own name, also where the path ends with a slash.
std::string name_of(const std::filesystem::path& folder) {
  return (folder.has_filename() ? folder : folder.parent_path()).filename().string();
}

const char* status_text(CheckpointStatus status) {
  switch (status) {
    case CheckpointStatus::committed:
      return "";
    case CheckpointStatus::pending_validation:
      return "pending";
    case CheckpointStatus::validated:
      return "done";
    case CheckpointStatus::validation_timeout:
      return "timed out";
    case CheckpointStatus::validation_failed:
      return "failed";
  }
  return "";
}

}  // namespace

std::string checkpoints_text(const std::vector<CheckpointInfo>& checkpoints) {
  Table table{{{"checkpoint"}, {"iteration", true}, {"epoch", true}, {"ranks", true}, {"size", true}, {"state"}}, {}};
  const bool validated = std::ranges::any_of(
      checkpoints, [](const CheckpointInfo& info) { return info.status != CheckpointStatus::committed; });
  if (validated) table.headings.push_back({"validation"});
  for (const auto& info : checkpoints) {
    table.rows.push_back({name_of(info.path), std::to_string(info.training_iteration), std::to_string(info.epoch),
                          std::to_string(info.world_size), bytes_text(info.bytes),
                          info.problem.empty()           ? "whole"
                          : info.code == ExitCode::retry ? "not readable"
                                                         : "damaged"});
    if (validated) table.rows.back().push_back(status_text(info.status));
  }
  std::string text = to_text(table), problems;
  for (const auto& info : checkpoints)
    if (!info.problem.empty()) problems += bullet(name_of(info.path) + ": " + info.problem);
  return problems.empty() ? text : text + "\n" + problems;
}

Json to_json(const CheckpointInfo& info) {
  return {
      {"path", info.path.string()}, {"index", info.index},           {"training_iteration", info.training_iteration},
      {"epoch", info.epoch},        {"world_size", info.world_size}, {"bytes", info.bytes},
      {"time", info.time},          {"metrics", info.metrics},       {"validation", status_text(info.status)},
      {"problem", info.problem}};
}

bool is_checkpoint(const std::filesystem::path& folder) {
  // Also by its name: a damaged one may have lost its files.
  return std::filesystem::exists(folder / "manifest.json") || name_of(folder).starts_with("checkpoint_");
}

bool is_run(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (name == "params.json" || name == "result.json" || name.starts_with("checkpoint_")) return true;
  }
  return false;
}

}  // namespace muster::tool
