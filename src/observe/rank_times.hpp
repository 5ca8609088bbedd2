// What the workers have spent the time of some steps on.
#pragma once

#include "muster/json.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::observe {

/// Of one worker, in seconds.
struct RankTimes {
  double compute = 0;  ///< the rest
  double wait = 0;     ///< in calls in which ranks wait for each other or exchange data, but for saves
  double data = 0;     ///< for batches that are not there yet
  double save = 0;     ///< saving checkpoints, without waiting for other ranks

  /// The time in which the other workers may wait for this one.
  double own() const noexcept { return compute + data; }
};

/// What may explain the time of a worker. Differences of watch::HostLoad, in seconds.
struct RankLoad {
  double read = 0;  ///< all threads of the process together, reading values of datasets from files
  double run_queue = 0, other_threads = 0, throttled = 0;
  std::int64_t major_faults = 0, clock_throttles = 0;
};

/// The workers' times and loads between two StepSamples.
struct StepWindow {
  std::int64_t steps = 0;
  double seconds = 0;
  std::vector<RankTimes> times = {};            ///< [rank]
  std::vector<RankLoad> loads = {};             ///< [rank]
  std::vector<std::int64_t> memory_bytes = {};  ///< [rank]: resident memory, at most some seconds old; 0 if not known
};

/// The median of the values; 0 if there are none.
double median(std::vector<double> values);
/// For a row: {"compute": {"min": …, "median": …, "max": …, "max_rank": …}, "wait": …, "data": …, "save": …}, in
/// seconds.
Json summary_of(const std::vector<RankTimes>& of_ranks);
/// For a row: {"max": …, "max_rank": …}.
Json summary_of(const std::vector<std::int64_t>& of_ranks);

}  // namespace muster::detail::observe
