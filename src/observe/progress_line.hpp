// Progress output while training runs: a line per report, and on a terminal a line that is updated.
#pragma once

#include "muster/launch.hpp"
#include "observe/observer.hpp"

#include <chrono>
#include <cstdint>
#include <string>

namespace muster::detail::observe {

/// Returns the updated line, without control characters, in less than `width` columns: the epoch, a bar, the part of
/// the epoch that is done, the speed, the time left, `metrics`, the step, `ranks`, `live`. If that is too wide, the bar
/// gets shorter and is then left out, next the fields from the last one on.
std::string progress_line(const EpochPosition& position, double samples_per_second, int width,
                          const std::string& metrics = {}, const std::string& ranks = {}, const std::string& live = {});
/// Returns "  slowest 3 (data)  2.1 GB": the worker that the others wait for, what it spends most time on (compute,
/// data, save, network), and the memory of the worker that uses most. A single worker has no "slowest".
std::string ranks_text(const StepWindow& window);
/// Returns the user's metrics in a report's row: "  loss 0.1235  accuracy 0.9".
std::string metrics_text(const Json& row);
/// Returns what a report's row says about live streams: "  heat 500/512 in memory, 3 on their way, 2.1 uses each,
/// solvers waited 0.4 s, trainer 1.2 s", and how many were dropped or lost, if any.
std::string live_text(const Json& row);
/// Returns the line of a report: epoch, the user's metrics, speed, checkpoint. Floating-point metrics are rounded to
/// four significant digits. The line counts epochs from 1, the row counts them from `first_epoch`.
std::string report_line(const Json& row, std::int64_t epochs, std::int64_t first_epoch = 0);

/// Writes the line of each report and the updated line to stderr.
class ProgressLine final : public Observer {
 public:
  /// Progress::automatic means a line for each report and, on a terminal that can redraw a line, the updated line.
  explicit ProgressLine(Progress mode, std::int64_t first_epoch = 0);
  ~ProgressLine() override;
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Redraws the updated line, at most ten times a second.
  void batch(const EpochPosition& position) override;
  void step_window(const StepWindow& window) override;
  void report(const Json& row, std::int64_t epochs) override;

 private:
  using Clock = std::chrono::steady_clock;
  void erase();

  std::int64_t first_epoch_;
  int terminal_ = -1;
  std::string last_metrics_, ranks_, last_live_;
  bool redraws_ = false;         ///< true if there is an updated line
  bool prints_reports_ = false;  ///< true if each report gets a line
  bool drawn_ = false;           ///< true if the updated line is on the terminal now
  Clock::time_point last_draw_{};
  Clock::time_point pass_begin_{};  ///< when this process has got the first batch of the present pass
  std::int64_t pass_first_ = 0;     ///< EpochPosition::consumed at pass_begin_
  EpochPosition previous_{.epoch = -1};
};

}  // namespace muster::detail::observe
