// Records some steps of training, and writes their trace (RunConfig::profile).
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

/// Begins and ends the recording, and gathers the events of all ranks at the next report.
class Profiler {
 public:
  /// Collective over the workers.
  Profiler(const ProfileConfig& config, std::filesystem::path run, const WorkerContext& workers);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Call when this step begins, on the thread that trains.
  void begin_step(std::int64_t step);
  /// Writes the trace when a worker has come to the step after the last one. Collective.
  void write_if_over();
  /// Writes what was recorded; warns if that is nothing. Collective.
  void finish();

 private:
  enum class State { before, recording, after, written };

  void stop();
  void write();

  const ProfileConfig config_;
  const std::filesystem::path run_;
  const Communicator workers_;
  const std::vector<comm::ClockOffset> clocks_at_begin_;
  State state_ = State::before;
  std::int64_t first_ = 0, last_ = 0;          ///< steps
  std::int64_t step_ = 0, step_begin_ns_ = 0;  ///< the step that has begun
  std::optional<StepPhases> phases_ = {};      ///< while steps are recorded
};

}  // namespace muster::detail::session
