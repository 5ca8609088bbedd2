#include "checkpoint_text.hpp"

#include "base/text.hpp"
#include "run_files.hpp"
#include "text.hpp"

#include <algorithm>
#include <iostream>
#include <string_view>

namespace muster::tool {
namespace {

/// Returns the last name in a path, even if the path ends with a slash.
std::string name_of(const std::filesystem::path& folder) {
  return (folder.has_filename() ? folder : folder.parent_path()).filename().string();
}

/// True for names like checkpoint_000000.
bool is_numbered(const std::filesystem::path& path) {
  constexpr std::string_view prefix = "checkpoint_";
  const auto name = name_of(path);
  return name.starts_with(prefix) && name.size() >= prefix.size() + 6 &&
         name.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
}

const char* status_text(CheckpointStatus status) {
  using enum CheckpointStatus;
  return status == pending_validation   ? "pending"
         : status == validated          ? "done"
         : status == validation_timeout ? "timed out"
         : status == validation_failed  ? "failed"
                                        : "";
}

}  // namespace

std::string checkpoints_text(const std::vector<CheckpointInfo>& checkpoints, bool verified) {
  Table table{{{"checkpoint"}, {"iteration", true}, {"epoch", true}, {"ranks", true}, {"size", true}, {"state"}}, {}};
  const bool validated = std::ranges::any_of(
      checkpoints, [](const CheckpointInfo& info) { return info.status != CheckpointStatus::committed; });
  if (validated) table.headings.push_back({"validation"});
  for (const auto& info : checkpoints) {
    table.rows.push_back({name_of(info.path), std::to_string(info.training_iteration), std::to_string(info.epoch),
                          std::to_string(info.world_size), bytes_text(info.bytes),
                          info.problem.empty()           ? verified ? "whole" : "not verified"
                          : info.code == ExitCode::retry ? "not readable"
                                                         : "damaged"});
    if (validated) table.rows.back().push_back(status_text(info.status));
  }
  std::string text = to_text(table), problems;
  Table measured{{{"checkpoint"}, {"metrics"}}, {}};
  for (const auto& info : checkpoints)
    if (const auto metrics = metrics_text(info.metrics); !verified && !metrics.empty())
      measured.rows.push_back({name_of(info.path), metrics});
  if (!measured.rows.empty()) text += "\n" + to_text(measured);
  for (const auto& info : checkpoints)
    if (!info.problem.empty()) problems += bullet(name_of(info.path) + ": " + info.problem);
  return problems.empty() ? text : text + "\n" + problems;
}

Json to_json(const CheckpointInfo& info, bool verified) {
  return {
      {"path", info.path.string()}, {"index", info.index},           {"training_iteration", info.training_iteration},
      {"epoch", info.epoch},        {"world_size", info.world_size}, {"bytes", info.bytes},
      {"time", info.time},          {"metrics", info.metrics},       {"validation", status_text(info.status)},
      {"problem", info.problem},    {"verified", verified}};
}

bool is_folder(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::none)
    throw Error(ExitCode::data, "opening " + path.string(), error.message(), "Check the path and the permissions");
  return std::filesystem::is_directory(status);
}

bool is_checkpoint(const std::filesystem::path& folder) {
  // The name counts, too, since a damaged checkpoint may have lost its files.
  std::error_code ignored;
  return std::filesystem::exists(folder / "manifest.json", ignored) || name_of(folder).starts_with("checkpoint_");
}

bool is_run(const std::filesystem::path& folder) {
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    if (name == "params.json" || name == "result.json" || name.starts_with("checkpoint_")) return true;
  }
  if (error) throw Error(ExitCode::data, "opening " + folder.string(), error.message(), "Check the permissions");
  return false;
}

bool is_sweep(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(folder / "sweep.json", ignored);
}

std::vector<CheckpointInfo> checkpoints_of(const std::filesystem::path& run) {
  std::error_code ignored;  // list_checkpoints() reports errors
  for (std::filesystem::directory_iterator at(run, ignored), end; !ignored && at != end; at.increment(ignored))
    if (std::error_code none; is_numbered(at->path()) && at->is_symlink(none))
      std::cerr << "muster: warning: " << printable(at->path().string())
                << " is a symbolic link and left out, as it is when the run goes on\n";
  return list_checkpoints(run);
}

void require_outside_records(const std::filesystem::path& output) {
  std::error_code ignored;  // the folder may not exist
  const auto whole = std::filesystem::absolute(output, ignored);
  auto folder = std::filesystem::weakly_canonical(whole.parent_path(), ignored);
  for (; folder.has_relative_path(); folder = folder.parent_path()) {
    const auto has = [&](const char* name) { return std::filesystem::exists(folder / name, ignored); };
    const bool checkpoint = is_numbered(folder) || (has("manifest.json") && has("state.h5"));
    if (checkpoint || (has("params.json") && has("logs") && has(".lock")))
      throw Error(ExitCode::usage, "writing " + output.string(),
                  detail::str("it lies in the ", checkpoint ? "checkpoint " : "run ", folder, ", which is a record"),
                  "Choose a path outside of it");
  }
}

}  // namespace muster::tool
