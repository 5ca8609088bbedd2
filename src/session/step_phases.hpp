// The phases of a step in a trace: forward and backward, and libtorch's operators if they are to be recorded.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace muster::detail::session {

/// Records phases while it lives, on the thread that made it and on the threads of its backward(). libtorch calls it at
/// the begin and end of every function of autograd, and if `operators` is true, of every operator. That costs time even
/// when nothing is recorded, so make it only for the steps that are recorded. At most one may live at a time.
class StepPhases {
 public:
  explicit StepPhases(bool operators);
  ~StepPhases();
  StepPhases(const StepPhases&) = delete;
  StepPhases& operator=(const StepPhases&) = delete;

  /// Call it when the forward pass of a step begins.
  void begin_step() noexcept;

 private:
  /// An operator that is running.
  struct Running;
  static std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function);
  static void end_operator(const at::RecordFunction& function, at::ObserverContext* context);
  void begin_backward();
  void end_backward() noexcept;

  const bool operators_;
  at::CallbackHandle callback_;
  std::int64_t forward_begin_ns_ = 0;
  std::int64_t backward_begin_ns_ = 0;
  std::atomic<bool> is_in_backward_{false};  ///< atomic, since autograd may run on another thread
};

}  // namespace muster::detail::session
