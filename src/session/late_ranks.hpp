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

  /// From now on, also counts the time in which the other threads among which torch divides an operation wait for a
  /// core. Call it on the thread that trains, after at::set_num_threads().
  void watch_intraop_threads();
  /// Call it when this step begins. On the first worker, compares the workers from time to time, gives their times to
  /// the observers, and logs a warning about a late worker, but not too often.
  void begin_step(std::int64_t step);
  /// The late workers that were found since the last call of forget_found(), for a report's row. Empty if there are
  /// none; always empty on workers other than the first.
  const Json& found() const noexcept { return found_; }
  /// Call it when a report has used found().
  void forget_found() { found_ = Json::array(); }

 private:
  /// The totals of time of all workers when they began a step, on the first worker.
  struct WorkerSamples {
    std::int64_t step = 0;
    std::vector<watch::StepSample> of_ranks;
  };
  void end_window(std::int64_t step);
  observe::StepWindow window_until(const WorkerSamples& end) const;
  void find_late(observe::StepWindow window);

  const bool is_first_;
  Outputs& outputs_;
  comm::StepTimes times_;
  observe::LateRankDetector detector_;
  observe::LateRankWarnings warnings_;
  std::int64_t interval_ = 2;                ///< steps between two samples; a power of two
  std::optional<WorkerSamples> begin_ = {};  ///< the sample at the beginning of the window
  std::int64_t next_sample_ = 0;             ///< the step of the next sample; 0 until the first step
  Json found_ = Json::array();
};

}  // namespace muster::detail::session
