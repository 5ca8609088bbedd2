// The files of a sweep: trial.json in each trial's folder, which is authoritative, and sweep.json and sweep.csv, which
// summarise all trials.
#pragma once

#include "base/run_names.hpp"
#include "muster/sweep.hpp"
#include "run/failures.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::sweep {

inline constexpr const char* table_file = run_names::sweep;
inline constexpr const char* trial_prefix = run_names::trial_prefix;

std::string name_of(int trial);
const char* text_of(TrialStatus status) noexcept;
inline bool has_ended_well(TrialStatus status) noexcept {
  return status == TrialStatus::done || status == TrialStatus::stopped;
}

/// The settings in order, with their full names: "optimizer.lr".
using Settings = std::vector<std::pair<std::string, Json>>;
Settings settings_of(const Config& config);

/// Converts a trial to a row, for the files and for other ranks, and back. Errors (ExitCode::data) begin with `doing`.
Json to_json(const Trial& trial);
Trial trial_of(const Json& row, const std::filesystem::path& folder, const std::string& doing);

/// A trial's starts that ended because a rank was lost. Kept in trial.json.
struct LostStarts {
  int count = 0;                 ///< starts in a row that were lost while it ran, in which it made no progress
  run::RunPoints furthest = {};  ///< how far it had come when it began to run
  bool alone = false;            ///< no other trial ran at the same time, so the lost rank was its own

  /// After this many losses, with the last one alone, it has failed for good.
  static constexpr int max_lost_starts = 2;
  bool are_final() const noexcept { return count >= max_lost_starts && alone; }
};

/// Returns how far the trial has come; nothing if it has no folder.
run::RunPoints points_of(const std::filesystem::path& trial);

/// Replaces trial.json in the trial's folder, which is created if necessary. Called by one rank.
void write_trial(const Trial& trial, const LostStarts& lost_starts = {});
/// The losses in trial.json; zero if it has none.
LostStarts read_lost_starts(const std::filesystem::path& trial);
/// The trial in trial.json; empty if there is no such file. An Error (ExitCode::data) if the file is invalid.
std::optional<Trial> read_trial(const std::filesystem::path& trial);

/// Replaces sweep.csv, and sweep.json, which has the trials' rows in addition to `about`. Called by one rank.
void write_tables(const std::filesystem::path& sweep, const std::vector<Trial>& trials, Json about);

}  // namespace muster::detail::sweep
