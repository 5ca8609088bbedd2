#pragma once

#include "step/steps.hpp"
#include "watch/time_use.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace muster::detail::session {

/// How far training has come, and how fast it is.
struct TrainingProgress {
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();  ///< epoch, global step, samples
  std::int64_t epoch_count = 0;  ///< the argument of session.epochs(); 0 if the training function counts epochs itself
  /// The last State was saved at `step`, in the middle of a pass over the dataset `dataset`.
  struct {
    std::string dataset = {};
    std::int64_t step = 0;
    bool warned = false;
  } unfinished_pass = {};
  bool is_between_epochs = false;  ///< between two epochs of the loop over session.epochs()
  bool pass_end_is_boundary =
      true;  ///< the end of a pass is a boundary for stops; false if a call ends there, with a report
  std::int64_t training_iteration = 0;  ///< number of reports
  double seconds_in_earlier_jobs = 0;   ///< training time of earlier jobs
  Clock::time_point began_at = Clock::now();
  Clock::time_point last_report = began_at;
  /// When the worker's times for the last report were taken, or training began. The save of that report comes after it.
  Clock::time_point times_taken_at = began_at;
  watch::TimeUse times_taken = {};  ///< of the thread that trains, at that moment

  /// Call when training begins, on the thread that trains.
  void start_clock() {
    began_at = last_report = times_taken_at = Clock::now();
    times_taken = watch::time_use();
  }
  double total_seconds() const {
    return seconds_in_earlier_jobs + std::chrono::duration<double>(Clock::now() - began_at).count();
  }
  /// The step at which TensorBoard shows what belongs to a report: the number of the report where no steps are counted.
  std::int64_t shown_step(std::int64_t report) const { return steps->global_step > 0 ? steps->global_step : report; }
  /// True if a checkpoint can hold the position in the data.
  bool has_position() const {
    return steps->find_unresumable_pass() == nullptr && (is_between_epochs || steps->find_unsaved_pass() == nullptr);
  }
  /// Starts counting samples and time for the next report.
  void end_report() {
    steps->samples_since_report = 0;
    last_report = Clock::now();
  }
};

}  // namespace muster::detail::session
