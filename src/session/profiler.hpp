// Records some steps of training and writes a trace of them (RunConfig::profile).
#pragma once

#include "comm/clock_offset.hpp"
#include "muster/config.hpp"
#include "session/step_phases.hpp"
#include "session/worker_context.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace muster::detail::session {

/// Starts and stops recording on this rank, and gathers the events of all ranks at the next report.
class Profiler {
 public:
  /// Collective over the workers.
  Profiler(const ProfileConfig& config, std::filesystem::path run, const WorkerContext& workers);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Call it when this step begins, on the thread that trains.
  void begin_step(std::int64_t step);
  /// Writes the trace if any worker has passed the last step to record. Collective.
  void write_if_over();
  /// Writes the events recorded so far, unless the trace is written already; logs a warning if there are none.
  /// Collective.
  void finish();

 private:
  enum class Stage { before, recording, after, written };

  void stop();
  void write();

  const ProfileConfig config_;
  const std::filesystem::path run_;
  const Communicator workers_;
  const std::vector<comm::ClockOffset> clocks_at_begin_;
  Stage stage_ = Stage::before;
  std::int64_t first_ = 0, last_ = 0;          ///< the steps to record; 0 until the first step
  std::int64_t step_ = 0, step_begin_ns_ = 0;  ///< the current step, and when it began
  std::optional<StepPhases> phases_ = {};      ///< set while steps are recorded
};

}  // namespace muster::detail::session
