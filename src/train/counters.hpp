// How far training has come, and how fast it goes.
#pragma once

#include "step/steps.hpp"

#include <chrono>
#include <cstdint>
#include <memory>

namespace muster::detail::train {

struct Counters {
  using Clock = std::chrono::steady_clock;

  std::shared_ptr<step::Steps> steps = std::make_shared<step::Steps>();  ///< epoch, global step, samples
  std::int64_t epochs = 0;              ///< of session.epochs(); 0 where the training function counts by itself
  std::int64_t training_iteration = 0;  ///< reports
  double seconds_before = 0;            ///< of training, in earlier jobs
  Clock::time_point begin = Clock::now();
  Clock::time_point last_report = begin;

  /// Training begins now.
  void start_clock() { begin = last_report = Clock::now(); }
  double total_seconds() const { return seconds_before + std::chrono::duration<double>(Clock::now() - begin).count(); }
  /// The samples and the time of the next report are counted from here.
  void end_report() {
    steps->samples_since_report = 0;
    last_report = Clock::now();
  }
};

}  // namespace muster::detail::train
