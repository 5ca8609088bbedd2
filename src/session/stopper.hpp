// Stops a session on request: all workers stop at the same boundary, see stop.hpp.
#pragma once

#include "muster/launch.hpp"
#include "muster/session.hpp"
#include "muster/state.hpp"
#include "run/run_folder.hpp"
#include "session/accumulated_gradients.hpp"
#include "session/attempt_end.hpp"
#include "session/outputs.hpp"
#include "session/prepared_models.hpp"
#include "session/saver.hpp"
#include "session/stop.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::session {

/// Asks at each boundary whether the run is to stop; then saves it and leaves the training function.
class Stopper {
 public:
  Stopper(const Launch& launch, const run::RunFolder& run, const WorkerContext& workers,
          const TrainingProgress& progress, const PreparedModels& models, AccumulatedGradients& gradients,
          Outputs& outputs, Saver& saver, AttemptEnd& attempt_end)
      : launch_(launch),
        run_(run),
        workers_(workers),
        progress_(progress),
        models_(models),
        outputs_(outputs),
        saver_(saver),
        attempt_end_(attempt_end),
        accumulated_(gradients) {}

  /// Looks for a file in the run's folder, too. Call on one rank.
  void watch_file(std::filesystem::path path) { file_ = StopFile(std::move(path)); }
  /// A State was reported: a stop between two reports saves the living one that was restored or reported last.
  void note_state(const std::shared_ptr<const StateEntries>& entries) { last_state_.note(entries); }
  /// The same when it was restored, so that the time of its first save can be estimated.
  void note_restored_state(const std::shared_ptr<const StateEntries>& entries);

  /// The State that a stop would save, if it lives on all workers; null if none does.
  std::shared_ptr<const StateEntries> last_state() const noexcept { return last_state_.lock(); }

  /// True if all workers know that one of them was asked to stop.
  bool is_known() const noexcept { return request_.is_known(); }
  /// True if this worker has been asked to stop, or has only the time left that it needs to save.
  bool is_asked_here();
  /// Call at a boundary outside of a report, between two batches. Saves and throws if any worker has been asked to stop
  /// and no gradients are accumulated. Collective at some of the boundaries, the same ones on all workers. Returns true
  /// at those.
  bool stop_if_asked();

  // A report is a boundary, too, and its exchange carries the workers' answers.
  void begin_report() noexcept { budget_.reached_boundary(); }
  void merge(bool any_asked) noexcept { request_.merge(any_asked); }
  /// Call at the end of a report. Stops if any worker was asked to. Collective.
  struct ReportedNow {
    bool saved = false;           ///< it has saved a checkpoint
    bool had_state = false;       ///< with a State
    bool had_checkpoint = false;  ///< with a Checkpoint of the user's own
  };
  void stop_if_asked_after_report(ReportedNow report);
  void end_report() noexcept { budget_.left_boundary(); }

  /// Session::should_stop(). Collective.
  bool should_stop();
  /// Session::preemption(). Collective.
  Preemption preemption();
  /// Call when the training function has returned. Throws if it has returned because it was told to stop. Collective.
  void end_training();
  /// True if training has ended on request.
  bool has_stopped() const noexcept { return has_stopped_; }

 private:
  /// `report`: the report at the end of which it stops, if it does so at one.
  void save_and_stop(std::optional<ReportedNow> report);
  /// True if gradients are accumulated on any worker, and there is time for the step that uses them. Collective.
  bool must_wait_for_a_step();
  bool may_wait_for_a_step() const;
  /// Why this worker has been asked to stop: "by SIGUSR1". `left`: until the end of the time, if that is the reason.
  std::string cause_of_stop(std::optional<std::chrono::duration<double>> left);
  /// Collective.
  [[noreturn]] void throw_stopped(bool saved);

  // The nine parts of the session that a stop reads, saves and ends, and what has been asked for and told so far.
  const Launch& launch_;
  const run::RunFolder& run_;
  const WorkerContext& workers_;
  const TrainingProgress& progress_;
  const PreparedModels& models_;
  Outputs& outputs_;
  Saver& saver_;
  AttemptEnd& attempt_end_;
  StopRequest request_ = {};
  StopFile file_ = {};
  std::string cause_ = {};  ///< why this worker has been asked to stop; empty if it has not
  ShutdownBudget budget_ = {};
  std::int64_t average_count_ = 0;  ///< summed over all models, at the last boundary
  AccumulatedGradients& accumulated_;
  LivingStates last_state_ = {};
  bool has_reported_checkpoint_ = false;  ///< a report has saved a Checkpoint of the user's own
  bool user_was_told_ = false;            ///< should_stop() or preemption() has told the user to stop
  bool has_stopped_ = false;
};

}  // namespace muster::detail::session
