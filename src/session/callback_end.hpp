// The end of training that a callback asks for.
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

/// Notes that a callback has asked for the end, and ends training on all workers at the same report.
class CallbackEnd {
 public:
  CallbackEnd(const WorkerContext& workers, const TrainingProgress& progress, const Outputs& outputs,
              AttemptEnd& attempt_end)
      : workers_(workers), progress_(progress), outputs_(outputs), attempt_end_(attempt_end) {}

  /// Checks whether a callback on any worker wants training to end. If so, throws TrainingEndedByCallback, unless the
  /// caller asks has_ended(). Collective.
  void check();
  bool has_ended() const noexcept { return has_ended_; }
  /// An operator's call runs to its end, and the operator trainer then asks has_ended() itself.
  void let_caller_ask() noexcept { throws_ = false; }

 private:
  const WorkerContext& workers_;
  const TrainingProgress& progress_;
  const Outputs& outputs_;
  AttemptEnd& attempt_end_;
  bool has_ended_ = false, throws_ = true;
};

}  // namespace muster::detail::session
