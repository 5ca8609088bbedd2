// Training that ends because a callback wants it.
#pragma once

#include "muster/error.hpp"
#include "session/attempt_end.hpp"
#include "session/outputs.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

namespace muster::detail::session {

/// Thrown to leave the training function when a callback has ended training.
class TrainingEndedByCallback final : public Error {
 public:
  TrainingEndedByCallback() : Error(ExitCode::done, "training ends here, as a callback has asked") {}
};

/// Finds out whether a callback on any worker wants training to end, and ends it on all workers at the same report.
class CallbackEnd {
 public:
  CallbackEnd(const WorkerContext& workers, const TrainingProgress& progress, const Outputs& outputs,
              AttemptEnd& attempt_end)
      : workers_(workers), progress_(progress), outputs_(outputs), attempt_end_(attempt_end) {}

  /// Asks the callbacks of all workers whether training must end. If one says so now or has said so before, throws
  /// TrainingEndedByCallback; after let_caller_ask() it does not throw, and the caller asks has_ended(). Collective.
  void check();
  bool has_ended() const noexcept { return has_ended_; }
  /// Makes check() not throw: an operator's call must run to its end, and the operator trainer asks has_ended() itself.
  void let_caller_ask() noexcept { throws_ = false; }

 private:
  const WorkerContext& workers_;
  const TrainingProgress& progress_;
  const Outputs& outputs_;
  AttemptEnd& attempt_end_;
  bool has_ended_ = false, throws_ = true;
};

}  // namespace muster::detail::session
