#pragma once

#include "step/steps.hpp"
#include "watch/time_use.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace muster::detail::session {

/// How far training has come, and how long it has taken.
struct TrainingProgress {
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();  ///< the epoch, the global step and the samples
  std::int64_t epoch_count = 0;  ///< argument of session.epochs(); 0 if the program counts epochs itself
  /// Set if a report has saved the State at global step `step`, in the middle of a pass over `dataset`.
  struct {
    std::string dataset = {};
    std::int64_t step = 0;
    bool warned = false;
  } unfinished_pass = {};
  bool is_between_epochs = false;  ///< true between two epochs of the loop over session.epochs()
  /// True if a stop is possible at the end of a pass; false in an operator's call that ends there with a report.
  bool pass_end_is_boundary = true;
  std::int64_t training_iteration = 0;  ///< number of reports
  double seconds_before_attempt = 0;    ///< training time until the checkpoint from which this attempt resumes
  Clock::time_point began_at = Clock::now();
  Clock::time_point last_report = began_at;  ///< when the last report ended, or when training began
  /// When the worker's times for the last report were taken, or when training began. Earlier than last_report: the save
  /// of that report came in between.
  Clock::time_point times_taken_at = began_at;
  watch::TimeUse times_taken = {};  ///< watch::time_use() of the thread that trains, at times_taken_at

  /// Call it when training begins, on the thread that trains.
  void start_clock() {
    began_at = last_report = times_taken_at = Clock::now();
    times_taken = watch::time_use();
  }
  double total_seconds() const {
    return seconds_before_attempt + std::chrono::duration<double>(Clock::now() - began_at).count();
  }
  /// Returns the step at which TensorBoard shows a report: the global step, or the report's number if no steps are
  /// counted.
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
