// Stops a session on request. All workers stop at the same boundary; see stop.hpp.
#pragma once

#include "muster/session.hpp"
#include "muster/state.hpp"
#include "session/stop.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::session {

struct SessionState;

/// Asks at each boundary whether the run must stop. If so, saves and leaves the training function by an exception.
class Stopper {
 public:
  explicit Stopper(SessionState& session) : session_(session) {}

  /// Makes is_asked_here() look for the stop file `path`, too. Call it on one rank.
  void watch_file(std::filesystem::path path) { file_ = StopFile(std::move(path)); }
  /// Call it when a State was reported. A stop between two reports saves the State that was noted last and still lives.
  void note_state(const std::shared_ptr<const StateEntries>& entries) { last_state_.note(entries); }
  /// Call it when a State was restored. Like note_state(); also estimates how long the first save will take.
  void note_restored_state(const std::shared_ptr<const StateEntries>& entries);

  /// Returns the State that a stop would save; null if none lives on this worker.
  std::shared_ptr<const StateEntries> last_state() const noexcept { return last_state_.lock(); }

  /// True if all workers know that one of them was asked to stop.
  bool is_known() const noexcept { return request_.is_known(); }
  /// True if this worker was asked to stop, or if the remaining time is only enough to stop in an orderly way; then
  /// keeps the reason.
  bool is_asked_here();
  /// Call it at a boundary outside of a report, between two batches. If any worker was asked to stop, saves the State,
  /// if there is one, and throws. Leaves the stop to a later boundary in three cases: a checkpoint cannot hold the
  /// position in the data; the program has only reported Checkpoints of its own; gradients are accumulated, and there
  /// is time to wait for the optimizer's step. Communicates at some of the boundaries only, the same on all workers.
  /// True if the workers have asked each other now. Collective.
  bool stop_if_asked();

  // A report is a boundary, too. The workers exchange their requests as part of the report and pass the result to
  // merge().
  void begin_report() noexcept { budget_.reached_boundary(); }
  void merge(bool any_asked) noexcept { request_.merge(any_asked); }
  /// What the report that is about to end has done.
  struct FinishedReport {
    bool saved = false;           ///< true if the report has saved a checkpoint
    bool had_state = false;       ///< true if any worker gave a State
    bool had_checkpoint = false;  ///< true if any worker gave a Checkpoint of the program's own
  };
  /// Call it at the end of a report. Stops if any worker was asked to. If the report has not saved a State but one was
  /// restored or reported before, saves that State first; if a checkpoint cannot hold the position in the data then,
  /// leaves the stop to a later boundary. Collective.
  void stop_if_asked_after_report(FinishedReport report);
  void end_report() noexcept { budget_.left_boundary(); }

  /// Implements Session::should_stop(). Collective.
  bool should_stop();
  /// Implements Session::preemption(). Collective.
  Preemption preemption();
  /// Call it when the training function has returned. Removes the stop file. Throws if should_stop() or preemption()
  /// has told the program to stop. Collective.
  void end_training();
  /// True if training has ended on request.
  bool has_stopped() const noexcept { return has_stopped_; }

 private:
  /// `report`: the report that has just ended; none between two batches.
  void save_and_stop(std::optional<FinishedReport> report);
  /// True if any worker has accumulated gradients or an open no_sync() scope, and all workers have time to wait for the
  /// optimizer's step. Collective.
  bool must_wait_for_a_step();
  bool may_wait_for_a_step() const;
  /// Returns why this worker was asked to stop, for example "by SIGUSR1". `left`: the remaining time, if that is the
  /// reason.
  std::string cause_of_stop(std::optional<std::chrono::duration<double>> left);
  /// Ends the attempt with the Error of a stop. `saved`: true if a State was saved. Collective.
  [[noreturn]] void throw_stopped(bool saved);

  SessionState& session_;
  StopRequest request_ = {};
  StopFile file_ = {};
  std::string cause_ = {};  ///< why this worker was asked to stop; empty if it was not
  ShutdownBudget budget_ = {};
  std::int64_t average_count_ = 0;  ///< gradient_average_count() at the last stop_if_asked()
  LivingStates last_state_ = {};
  bool has_reported_checkpoint_ = false;  ///< true if a report got a Checkpoint of the program's own
  bool user_was_told_ = false;            ///< true if should_stop() or preemption() has told the program to stop
  bool has_stopped_ = false;
};

}  // namespace muster::detail::session
