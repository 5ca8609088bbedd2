// The names of muster's own files and folders in a run's folder or in a checkpoint. The program's names for
// checkpoints, which become links in the run's folder, must be different from all of them.
#pragma once

#include <algorithm>
#include <array>
#include <ctime>
#include <string>
#include <string_view>

namespace muster::detail::run_names {

inline constexpr const char* params = "params.json";
inline constexpr const char* history = "result.json";
inline constexpr const char* table = "progress.csv";
inline constexpr const char* status = "status.json";
inline constexpr const char* error = "error.txt";
inline constexpr const char* passes = "passes.json";
inline constexpr const char* trial = "trial.json";
inline constexpr const char* sweep = "sweep.json";
inline constexpr const char* sweep_table = "sweep.csv";
inline constexpr const char* stop = "stop";
inline constexpr const char* logs = "logs";
inline constexpr const char* trial_prefix = "trial_";  ///< begins the names of the trials' folders

/// The present local time in the form that names of runs have: "2026-11-27_14-05-59".
inline std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d_%H-%M-%S", &local);
  return text.data();
}

/// True if muster may make a file or folder of this name. It is false for names that begin with "." or "checkpoint_",
/// although muster uses some of them, because programs may give no such name anyway.
constexpr bool is_own(std::string_view name) {
  constexpr std::array<std::string_view, 19> names{params,
                                                   history,
                                                   table,
                                                   status,
                                                   error,
                                                   passes,
                                                   trial,
                                                   sweep,
                                                   sweep_table,
                                                   stop,
                                                   logs,
                                                   "artifacts",
                                                   "steps_back.json",
                                                   "fast_tier.json",
                                                   "report.html",
                                                   "manifest.json",
                                                   "state.h5",
                                                   "metadata.json",
                                                   "validation.json"};
  constexpr std::array<std::string_view, 3> prefixes{trial_prefix, "trace_", "events.out."};
  return std::ranges::find(names, name) != names.end() ||
         std::ranges::any_of(prefixes, [&](auto prefix) { return name.starts_with(prefix); });
}

}  // namespace muster::detail::run_names
