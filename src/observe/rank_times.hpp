// What the workers spend the time of their steps on.
#pragma once

#include "muster/json.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::observe {

/// The times of one worker, in seconds.
struct RankTimes {
  double compute = 0;  ///< the rest of the time, without the following and without waits for other ranks in a save
  double wait = 0;     ///< in calls that wait for other ranks or exchange data with them, except for saves
  double data = 0;     ///< waiting for batches that are not ready
  double save = 0;     ///< saving checkpoints, without waiting for other ranks

  /// The time in which other workers may wait for this worker.
  double own() const noexcept { return compute + data; }
};

/// What may explain why a worker takes long: differences between two watch::HostLoad, in seconds, and counts.
struct RankLoad {
  double read = 0;  ///< reading values of datasets from files, summed over all threads of the process
  double run_queue = 0, other_threads = 0, throttled = 0;
  std::int64_t major_faults = 0, clock_throttles = 0;
};

/// The times and loads of all workers between two of their watch::StepSamples.
struct StepWindow {
  std::int64_t steps = 0;                       ///< number of steps in the window
  double seconds = 0;                           ///< length of the window by the first worker's clock
  std::vector<RankTimes> times = {};            ///< [rank]
  std::vector<RankLoad> loads = {};             ///< [rank]
  std::vector<std::int64_t> memory_bytes = {};  ///< [rank]: resident memory, at most some seconds old; 0 if unknown
};

/// Returns the median of the values; 0 if there are none.
double median(std::vector<double> values);
/// Returns fields for a row: {"compute": {"min": …, "median": …, "max": …, "max_rank": …}, "wait": …, "data": …,
/// "save": …}, in seconds.
Json summary_of(const std::vector<RankTimes>& of_ranks);
/// Returns fields for a row: {"max": …, "max_rank": …}; `max_rank` is the rank with the greatest value.
Json summary_of(const std::vector<std::int64_t>& of_ranks);

}  // namespace muster::detail::observe
