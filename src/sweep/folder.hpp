// The files of a sweep: trial.json in each trial's folder has the trial's row and counts its lost starts; sweep.json
// and sweep.csv summarise all trials.
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

/// The settings of a trial in order, with their full names: "optimizer.lr".
using Settings = std::vector<std::pair<std::string, Json>>;
Settings settings_of(const Config& config);

/// Convert a trial to a row, for the files and for other ranks, and back. If the row is invalid, trial_of() throws an
/// Error (ExitCode::data) that begins with `doing`.
Json to_json(const Trial& trial);
Trial trial_of(const Json& row, const std::filesystem::path& folder, const std::string& doing);

/// The starts of a sweep in which a rank was lost while the trial ran. Kept in trial.json.
struct LostStarts {
  int count = 0;                 ///< number of such starts since the trial has last made progress
  run::RunPoints furthest = {};  ///< how far the trial had come when it was started last
  bool alone = false;  ///< true if no other trial ran at the same time, so that the lost rank was this trial's

  /// A trial has failed for good after this many losses, if it ran alone at the last one.
  static constexpr int max_lost_starts = 2;
  bool are_final() const noexcept { return count >= max_lost_starts && alone; }
};

/// Returns how far the trial has come; an empty map if it has no folder or no checkpoint.
run::RunPoints points_of(const std::filesystem::path& trial);

/// Writes trial.json in the trial's folder, which it makes if needed. Throws an Error if the sweep's folder is gone.
/// Call it on one rank.
void write_trial(const Trial& trial, const LostStarts& lost_starts = {});
/// Returns the lost starts in trial.json; a count of 0 if it has none. Throws an Error (ExitCode::data) if they are
/// invalid.
LostStarts read_lost_starts(const std::filesystem::path& trial);
/// Returns the trial in trial.json; none if there is no such file. Throws an Error (ExitCode::data) if the file is
/// invalid.
std::optional<Trial> read_trial(const std::filesystem::path& trial);

/// Writes or replaces sweep.csv and sweep.json; sweep.json has the trials' rows and `about`. Call it on one rank.
void write_tables(const std::filesystem::path& sweep, const std::vector<Trial>& trials, Json about);

}  // namespace muster::detail::sweep
