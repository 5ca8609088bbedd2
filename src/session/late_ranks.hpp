// Finds the workers that the others wait for, while training runs.
#pragma once

#include "comm/step_times.hpp"
#include "muster/json.hpp"
#include "observe/late_rank_detector.hpp"
#include "session/outputs.hpp"
#include "session/worker_context.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::session {

/// Compares the workers' times from time to time, and tells the observers which workers are late.
class LateRanks {
 public:
  /// Collective over the workers.
  LateRanks(const WorkerContext& workers, Outputs& outputs);

  /// From now on, counts the time in which torch's threads for operations wait for a core. Call it on the thread that
  /// trains, after the number of threads is set.
  void watch_intraop_threads();
  /// Call it when this step begins. On the first worker, compares the workers from time to time, gives their times to
  /// the observers, and logs a warning about a late worker, but not too often.
  void begin_step(std::int64_t step);
  /// The late workers found since forget_found(), for a report's row. Empty if there are none, and always on other
  /// workers than the first.
  const Json& found() const noexcept { return found_; }
  /// Call it when a report has used found().
  void forget_found() { found_ = Json::array(); }

 private:
  /// The sums of times that all workers had when they began a step.
  struct Sampled {
    std::int64_t step = 0;
    std::vector<watch::StepSample> of_ranks;
  };
  void end_window(std::int64_t step);
  observe::StepWindow window_until(const Sampled& end) const;
  void find_late(observe::StepWindow window);

  const bool is_first_;
  Outputs& outputs_;
  comm::StepTimes times_;
  observe::LateRankDetector detector_;
  observe::LateRankWarnings warnings_;
  std::int64_t interval_ = 2;          ///< steps between two samples; a power of two
  std::optional<Sampled> begin_ = {};  ///< the sample at the beginning of the window
  std::int64_t next_sample_ = 0;
  Json found_ = Json::array();
};

}  // namespace muster::detail::session
