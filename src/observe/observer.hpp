// The interface of what observes a run: files, the progress line, the user's callbacks. All are told of the same
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

/// The point from which an attempt of training starts.
struct AttemptStart {
  std::int64_t training_iteration = 0;  ///< the last report that counts; later reports are made again
  /// The row of that report, from the checkpoint that training goes on from. Null if there is no checkpoint, or if it
  /// was saved between two reports.
  Json last_row = nullptr;
  /// The run had given up that checkpoint and returns to it, so the reports noted since then are of another course of
  /// training.
  bool was_given_up = false;
  /// True if the checkpoint of that name is the one that training goes on from, or an earlier one of the same course.
  /// Unset if the run has no checkpoint.
  std::function<bool(const std::string&)> is_ancestor = {};
  std::int64_t global_step = 0;  ///< the last step that counts; later steps are made again
  double time_total_s = 0;       ///< training time up to that step; later time was spent on steps that are made again
};

/// The progress in an epoch.
struct EpochPosition {
  std::int64_t epoch = 0;
  std::int64_t epochs = 0;       ///< number of epochs; 0 if not known
  std::int64_t consumed = 0;     ///< samples of this epoch, over all workers
  std::int64_t samples = 0;      ///< in the epoch
  std::int64_t global_step = 0;  ///< steps of the run
};

/// Made for one attempt, on the workers that observers.cpp chooses. The functions are called on the thread of the
/// training function: start, then batches, epochs, reports and checkpoints, then failure or end.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void start(const AttemptStart&) {}
  /// An epoch of session.epochs() is over.
  virtual void epoch(std::int64_t /*epoch*/) {}
  /// A batch that completes a step has been handed out.
  virtual void batch(const EpochPosition&) {}
  /// What all workers have spent the time of the last steps on. Called on the first worker.
  virtual void step_window(const StepWindow&) {}
  /// The others have begun to wait for this worker (Callback::on_late_rank). Called on the first worker.
  virtual void late_rank(const LateRank&) {}
  /// A report begins: its row, before a checkpoint is saved.
  virtual void report_begins(const Json& /*row*/) {}
  /// That report has failed, and nothing of it counts.
  virtual void report_failed() {}
  /// The report is made: its row in result.json, and the number of epochs of session.epochs(), 0 if the training
  /// function counts epochs itself.
  virtual void report(const Json& /*row*/, std::int64_t /*epochs*/) {}
  /// After that: each worker's own metrics, by rank, and the checkpoint that was saved with it.
  virtual void report_ended(const std::vector<Json>& /*metrics*/, const std::optional<Checkpoint>&) {}
  /// A checkpoint is committed, by a report or because the run is asked to stop. The report's row comes next, or came
  /// before if the checkpoint was saved asynchronously.
  virtual void checkpoint(const Checkpoint&) {}
  /// A checkpoint that a row has named could not be written.
  virtual void checkpoint_lost(const Checkpoint&) {}
  /// A validation has measured the checkpoint of a report; the fields replace the fields of the same name in its row.
  virtual void validated(std::int64_t /*training_iteration*/, const Json& /*fields*/) {}
  /// The training function has logged a value or a picture (Session::log_scalar, Session::log_image), or a report takes
  /// the values of a parameter or its gradient (RunConfig::histogram_interval). On the first worker.
  virtual void scalar(const std::string& /*name*/, double /*value*/, std::int64_t /*step*/) {}
  virtual void image(const std::string& /*name*/, const at::Tensor& /*image*/, std::int64_t /*step*/) {}
  virtual void histogram(const std::string& /*name*/, const at::Tensor& /*values*/, std::int64_t /*step*/) {}
  /// This worker leaves training with an error, which may be another worker's error or a stop on request.
  virtual void failure(const Error&) {}
  virtual void end() {}
};

}  // namespace muster::detail::observe
