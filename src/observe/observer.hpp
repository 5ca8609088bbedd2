// The interface of everything that observes a run: files, the progress line, the user's callbacks. All get the same
// events.
#pragma once

#include "muster/callback.hpp"
#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"
#include "observe/rank_times.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::observe {

/// The state of a run when an attempt of training starts.
struct AttemptStart {
  std::int64_t training_iteration = 0;  ///< number of the last report before the checkpoint; later ones are repeated
  /// The row of that report, from the checkpoint that training resumes from. Null if there is no checkpoint, or if it
  /// was saved between two reports.
  Json last_row = nullptr;
  /// True if the run had rolled back this checkpoint and now returns to it. Then the rows of later reports belong to
  /// another course of training.
  bool was_given_up = false;
  /// True for the name of the checkpoint that training resumes from, or of an earlier checkpoint that led to it. Empty
  /// if the run has no checkpoint.
  std::function<bool(const std::string&)> is_ancestor = {};
  std::int64_t global_step = 0;  ///< the last step before the checkpoint; later steps are repeated
  double time_total_s = 0;       ///< training time up to that step
};

/// How far training has come in an epoch.
struct EpochPosition {
  std::int64_t epoch = 0;
  std::int64_t epochs = 0;       ///< number of epochs; 0 if unknown
  std::int64_t consumed = 0;     ///< samples of this epoch that all workers together have consumed
  std::int64_t samples = 0;      ///< samples in the epoch; 0 if unknown
  std::int64_t global_step = 0;  ///< steps of the run
};

/// An observer of one attempt, on the workers that observers.cpp chooses. Its functions are called on the thread of the
/// training function: start(), then batches, epochs, reports and checkpoints, then failure() or end().
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void start(const AttemptStart&) {}
  /// Called when an epoch of the loop over session.epochs() is over.
  virtual void epoch(std::int64_t /*epoch*/) {}
  /// Called when a batch that completes a step has been handed out.
  virtual void batch(const EpochPosition&) {}
  /// Called on the first worker from time to time, with what all workers have spent the time of the last steps on.
  virtual void step_window(const StepWindow&) {}
  /// Called on the first worker when the others have begun to wait for a worker (Callback::on_late_rank).
  virtual void late_rank(const LateRank&) {}
  /// Called when a report begins, with its row, before a checkpoint is saved; only if a worker has callbacks.
  virtual void report_begins(const Json& /*row*/) {}
  /// Called if a report has failed, even before report_begins(); nothing of it counts.
  virtual void report_failed() {}
  /// Called when the report is made. `row`: its row in result.json. `epochs`: the argument of session.epochs(); 0 if
  /// the program counts epochs itself.
  virtual void report(const Json& /*row*/, std::int64_t /*epochs*/) {}
  /// Called after report() if a worker has callbacks, with each worker's own metrics, by rank, and the checkpoint that
  /// was saved with the report.
  virtual void report_ended(const std::vector<Json>& /*metrics*/, const std::optional<Checkpoint>&) {}
  /// Called when a checkpoint is committed, by a report or by a stop. The call of report() for the same report comes
  /// afterwards; if the checkpoint was saved asynchronously or through a fast tier, it came before.
  virtual void checkpoint(const Checkpoint&) {}
  /// Called if a checkpoint could not be written although a row names it.
  virtual void checkpoint_lost(const Checkpoint&) {}
  /// Called when the validation of a report's checkpoint has ended, also without success. The fields replace the fields
  /// of the same name in the report's row.
  virtual void validated(std::int64_t /*training_iteration*/, const Json& /*fields*/) {}
  /// Called when the training function logs a value or a picture on this worker (Session::log_scalar,
  /// Session::log_image), and on the first worker with the values of a parameter or its gradient
  /// (RunConfig::histogram_interval).
  virtual void scalar(const std::string& /*name*/, double /*value*/, std::int64_t /*step*/) {}
  virtual void image(const std::string& /*name*/, const at::Tensor& /*image*/, std::int64_t /*step*/) {}
  virtual void histogram(const std::string& /*name*/, const at::Tensor& /*values*/, std::int64_t /*step*/) {}
  // The last call is one of the following two.
  /// Called when this worker leaves training with an error: its own, another worker's, or a stop on request.
  virtual void failure(const Error&) {}
  /// Called when training has ended well.
  virtual void end() {}
};

}  // namespace muster::detail::observe
