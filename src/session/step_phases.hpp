// The phases of a step in a trace: forward and backward, and libtorch's operators where they are asked for.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace muster::detail::session {

/// While it lives, records the phases of the thread that made it. libtorch calls it whenever an operator begins and
/// ends, so that it costs something while nothing is recorded, too: make it for the steps that are recorded. There may
/// be one.
class StepPhases {
 public:
  explicit StepPhases(bool operators);
  ~StepPhases();
  StepPhases(const StepPhases&) = delete;
  StepPhases& operator=(const StepPhases&) = delete;

  /// The forward computation of a step begins.
  void begin_step() noexcept;

 private:
  /// An operator that runs.
  struct Running;
  static std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function);
  static void end_operator(const at::RecordFunction& function, at::ObserverContext* context);
  void begin_backward();
  void end_backward() noexcept;

  const bool operators_;
  at::CallbackHandle callback_;
  std::int64_t forward_begin_ns_ = 0;
  std::int64_t backward_begin_ns_ = 0;
  std::atomic<bool> is_in_backward_{false};  ///< autograd may run on a thread of its own
};

}  // namespace muster::detail::session
