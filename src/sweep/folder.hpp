// What a sweep leaves behind: trial.json in each trial's folder, which is what counts, and sweep.json and sweep.csv, in
// which all of them are seen at once.
#pragma once

#include "muster/sweep.hpp"
#include "train/failures.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::sweep {

inline constexpr const char* table_file = "sweep.json";
inline constexpr const char* trial_prefix = "trial_";

std::string name_of(int trial);
const char* text_of(TrialStatus status) noexcept;
inline bool has_ended_well(TrialStatus status) noexcept {
  return status == TrialStatus::done || status == TrialStatus::stopped;
}

/// The settings by their whole names, in order: "optimizer.lr".
using Settings = std::vector<std::pair<std::string, Json>>;
Settings settings_of(const Config& config);

/// A row as JSON, for the files and for other ranks, and back. An Error (ExitCode::data) that begins with `doing`.
Json to_json(const Trial& trial);
Trial trial_of(const Json& row, const std::filesystem::path& folder, const std::string& doing);

/// What became of a trial in starts that a lost rank has ended. Kept in trial.json.
struct Losses {
  int count = 0;                   ///< starts in a row that were lost while it ran, in which it made no progress
  train::RunPoints furthest = {};  ///< how far it had come when it began to run
  bool alone = false;              ///< no other trial ran at the same time, so the lost rank was its own

  /// That often, and the last time alone, it has failed for good.
  static constexpr int most = 2;
  bool are_final() const noexcept { return count >= most && alone; }
};

/// Returns how far the trial has come; nothing if it has no folder.
train::RunPoints progress_of(const std::filesystem::path& trial);

/// Replaces trial.json in the trial's folder, which is made if need be. By one rank.
void write_row(const Trial& trial, const Losses& losses = {});
/// What trial.json says of them; none where it says nothing.
Losses read_losses(const std::filesystem::path& trial);
/// None where there is no trial.json. An Error (ExitCode::data) where it cannot be one.
std::optional<Trial> read_row(const std::filesystem::path& trial);

/// Replaces sweep.json, which says `about` beside its rows, and sweep.csv. By one rank.
void write_tables(const std::filesystem::path& sweep, const std::vector<Trial>& trials, Json about);

}  // namespace muster::detail::sweep
