// One group of ranks in a sweep: it runs one trial after the other until none is left.
#pragma once

#include "muster/sweep.hpp"
#include "sweep/folder.hpp"
#include "sweep/space.hpp"
#include "sweep/trial_queue.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

namespace muster::detail::sweep {

/// What all groups of a sweep need; the same on all ranks unless stated.
struct SweepWork {
  Launch& launch;
  const Trainable& trainable;
  const SweepOptions& options;
  std::filesystem::path folder = {};
  std::uint64_t seed = 0;                          ///< seed of the sweep, perhaps from an earlier start
  std::vector<TrialSettings> trial_settings = {};  ///< [trial]
  Json settings = {};                              ///< settings that all trials share; on rank 0 of the launch
  std::vector<Trial> trials = {};                  ///< [trial]: state of each trial when this start of the sweep began
  std::vector<LostStarts> lost_starts = {};        ///< [trial]; only LostStarts::count is set
  std::vector<int> to_do = {};                     ///< numbers of the trials to run, in this order
  bool one_at_a_time = false;                      ///< true if only one trial runs at a time
  std::vector<std::int64_t> rungs = {};            ///< the scheduler's rungs
  std::vector<Scores> scores = {};                 ///< [rung]: scores when this start of the sweep began
  std::function<void()> refresh = [] {};           ///< updates the tables of the sweep; on rank 0 of the launch
};

/// Returns the Error of a sweep in which no trial has reported its metric, or none as a number. `rows`: what the trials
/// have reported.
Error missing_metric(const std::string& metric, const std::vector<Json>& rows);

/// The file in the sweep's folder by which a group asks the other groups to stop.
inline constexpr const char* stopping_file = ".stopping";
/// Creates stopping_file. Never throws: if the file cannot be created, logs a warning, and only this group stops.
void ask_others_to_stop(const std::filesystem::path& folder) noexcept;

/// Runs trials until none is left or the sweep should stop. An error of a trial is only recorded in the trial's row.
/// Throws an error of the sweep, for example that a trial has ended and none has reported the metric. `ranks` must be a
/// world of its own. Collective over `ranks`.
void run_trials(const SweepWork& work, TrialQueue& queue, const Communicator& ranks);

}  // namespace muster::detail::sweep
