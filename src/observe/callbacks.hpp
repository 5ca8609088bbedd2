// The user's callbacks of a run. They are observers that may also give metrics and a state, and may end training.
#pragma once

#include "muster/callback.hpp"
#include "observe/observer.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::observe {

/// Calls `tell` with each callback that is not null. Logs its exceptions as warnings with `what`, a name for the event.
void tell_and_log_errors(const char* what, const std::vector<std::shared_ptr<Callback>>& callbacks,
                         const std::function<void(Callback&)>& tell) noexcept;

/// The callbacks of one attempt on one worker.
class Callbacks final : public Observer {
 public:
  explicit Callbacks(std::vector<std::shared_ptr<Callback>> run_callbacks);

  /// Call it when an attempt begins. `saved`: what state() returned when the checkpoint was saved; null if there is
  /// none.
  void begin_attempt(Session& session, Json saved);
  /// Adds a callback made in the training function, and starts it. It is not called after forget_added(), since it may
  /// refer to objects of the training function.
  void add(std::shared_ptr<Callback> callback, Session& session);
  void forget_added() noexcept { callbacks_.resize(run_callbacks_); }

  void epoch(std::int64_t epoch) override { tell(&Callback::on_epoch, epoch); }
  void batch(const EpochPosition& position) override { tell(&Callback::on_batch, position.global_step); }
  void late_rank(const LateRank& late) override { tell(&Callback::on_late_rank, late); }
  void report_begins(const Json& row) override { tell(&Callback::on_report, row); }
  /// Tells the callbacks about a failed report, if it had asked them for metrics. Logs their exceptions as warnings.
  void report_failed() override;
  void report_ended(const std::vector<Json>& metrics, const std::optional<Checkpoint>& checkpoint) override {
    tell(&Callback::after_report, metrics, checkpoint);
  }
  void validated(std::int64_t training_iteration, const Json& fields) override;
  void checkpoint(const Checkpoint& checkpoint) override { tell(&Callback::on_checkpoint, checkpoint); }
  // failure() and end() do nothing before begin_attempt(), and log exceptions of callbacks as warnings.
  void failure(const Error& error) override;
  void end() override;

  bool empty() const noexcept { return callbacks_.empty(); }
  /// Call it when a report begins. If the report fails before with_callback_metrics(), report_failed() then does
  /// nothing.
  void begin_report() noexcept { before_report_.clear(); }
  /// Called at a report: returns `metrics` and the metrics that the callbacks add.
  Metrics with_callback_metrics(Metrics metrics);
  bool should_stop() const;
  /// Returns a metric by which a callback decides (Callback::decides_by) and which `row` does not have; empty if there
  /// is none. A callback names its metric there only until a report has had it.
  std::string awaited_metric(const Json& row) const;
  /// Returns the callbacks' states, by their keys; null if none has a state.
  Json state() const;

 private:
  template <class... Parameters, class... Arguments>
  void tell(void (Callback::*event)(Parameters...), const Arguments&... arguments) {
    for (const auto& callback : callbacks_) (callback.get()->*event)(arguments...);
  }
  void begin(const std::shared_ptr<Callback>& callback, Session& session);
  /// Called if `saved_` has no state for the callback's key. If it has another state of the callback's class, whose own
  /// callback is not there now, warns and returns true.
  bool warn_of_lost_state(const Callback& callback, const std::string& key) const;

  std::vector<std::shared_ptr<Callback>> callbacks_;  ///< the run's callbacks, then the added ones
  std::size_t run_callbacks_ = 0;                     ///< number of the run's callbacks
  bool has_begun_ = false;
  Json saved_ = {};
  std::vector<Json> before_report_ = {};  ///< each callback's state before it gave its metrics for the report
};

}  // namespace muster::detail::observe
