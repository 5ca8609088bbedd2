// One group of ranks in a sweep: runs trials, one after the other, as long as there are any.
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

/// The work of a sweep, the same on all ranks, a member for each part of it.
struct SweepWork {
  Launch& launch;
  const Trainable& trainable;
  const SweepOptions& options;
  std::filesystem::path folder = {};
  std::uint64_t seed = 0;                          ///< of the sweep, which may be that of an earlier start
  std::vector<TrialSettings> trial_settings = {};  ///< [trial]
  Json settings = {};                              ///< the settings that all trials share; on rank 0 of the launch
  std::vector<Trial> trials = {};                  ///< [trial]: their state when the sweep was started
  std::vector<LostStarts> lost_starts = {};        ///< [trial]
  std::vector<int> to_do = {};                     ///< the numbers of the trials to run, in this order
  bool one_at_a_time = false;                      ///< true if only one trial runs at a time
  std::vector<std::int64_t> rungs = {};            ///< the scheduler's rungs
  std::vector<Scores> scores = {};                 ///< [rung]: the scores when the sweep was started
  std::function<void()> refresh = [] {};           ///< updates the tables; on rank 0 of the launch
};

/// The Error of a sweep in which no trial has reported its metric, or none as a number. `rows`: what they have
/// reported.
Error missing_metric(const std::string& metric, const std::vector<Json>& rows);

/// The file in the sweep's folder with which groups ask each other to stop.
inline constexpr const char* stopping_file = ".stopping";
/// Never throws: if the others cannot be asked, this group stops alone.
void ask_others_to_stop(const std::filesystem::path& folder) noexcept;

/// Returns when there is no trial left, or when the sweep should stop. An error of a trial is in its row; an exception
/// is an error of the sweep, also that a trial has ended and none has reported the metric. `ranks` must be a separate
/// world. Collective over them.
void run_trials(const SweepWork& work, TrialQueue& queue, const Communicator& ranks);

}  // namespace muster::detail::sweep
