// Finds the workers for which the others wait, while training goes on.
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

/// Compares the times of the workers now and then, and tells the observers of late ones.
class LateRanks {
 public:
  /// Collective over the workers.
  LateRanks(const WorkerContext& workers, Outputs& outputs);

  /// Counts the time for which torch's threads for operations have no core. Call it once their number is set, on the
  /// thread that trains.
  void watch_intraop_threads();
  /// Call when this step begins. On the first worker, tells the observers the times of the workers from time to time,
  /// and warns of a late one, now and then.
  void begin_step(std::int64_t step);
  /// The late workers that were found since forget_found(), for a report's row. Empty if there are none, and on other
  /// workers than the first.
  const Json& found() const noexcept { return found_; }
  /// Call when the report is made.
  void forget_found() { found_ = Json::array(); }

 private:
  /// What all workers had spent when they began a step.
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
  std::optional<Sampled> begin_ = {};  ///< of the window
  std::int64_t next_sample_ = 0;
  Json found_ = Json::array();
};

}  // namespace muster::detail::session
