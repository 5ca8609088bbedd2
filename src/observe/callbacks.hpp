// The user's callbacks of a run. They observe it like its files; they also give metrics and state, and may end
// training.
#pragma once

#include "muster/callback.hpp"
#include "observe/observer.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::observe {

/// Calls `tell` with each callback that is not null. Logs what it throws as a warning. `what`: the event, for the
/// warning.
void tell_and_log_errors(const char* what, const std::vector<std::shared_ptr<Callback>>& callbacks,
                         const std::function<void(Callback&)>& tell) noexcept;

/// The callbacks of one attempt on one worker.
class Callbacks final : public Observer {
 public:
  explicit Callbacks(std::vector<std::shared_ptr<Callback>> run_callbacks);

  /// Training begins. `saved` is the state() from the checkpoint, null if there is none.
  void begin_attempt(Session& session, Json saved);
  /// Adds a callback of the training function and starts it. It may refer to objects of that function, so it is not
  /// called after forget_added().
  void add(std::shared_ptr<Callback> callback, Session& session);
  void forget_added() noexcept { callbacks_.resize(run_callbacks_); }

  void epoch(std::int64_t epoch) override { tell(&Callback::on_epoch, epoch); }
  void batch(const EpochPosition& position) override { tell(&Callback::on_batch, position.global_step); }
  void late_rank(const LateRank& late) override { tell(&Callback::on_late_rank, late); }
  void report_begins(const Json& row) override { tell(&Callback::on_report, row); }
  /// Logs what a callback throws as a warning.
  void report_failed() override;
  void report_ended(const std::vector<Json>& metrics, const std::optional<Checkpoint>& checkpoint) override {
    tell(&Callback::after_report, metrics, checkpoint);
  }
  void validated(std::int64_t training_iteration, const Json& fields) override;
  void checkpoint(const Checkpoint& checkpoint) override { tell(&Callback::on_checkpoint, checkpoint); }
  /// No effect before begin_attempt(). Logs what a callback throws as a warning, and so does end().
  void failure(const Error& error) override;
  void end() override;

  bool empty() const noexcept { return callbacks_.empty(); }
  /// Call when a report begins: it has changed nothing yet that report_failed() sets back.
  void begin_report() noexcept { before_report_.clear(); }
  /// `metrics` and the callbacks' own metrics, for a report that begins.
  Metrics with_callback_metrics(Metrics metrics);
  bool should_stop() const;
  /// A metric that a callback decides by and no report has had so far (Callback::decides_by) and `row` lacks; empty if
  /// there is none.
  std::string awaited_metric(const Json& row) const;
  /// The callbacks' states, by class and name; null if none has a state.
  Json state() const;

 private:
  template <class... Parameters, class... Arguments>
  void tell(void (Callback::*moment)(Parameters...), const Arguments&... arguments) {
    for (const auto& callback : callbacks_) (callback.get()->*moment)(arguments...);
  }
  void begin(const std::shared_ptr<Callback>& callback, Session& session);
  /// Warns and returns true if `saved_` has a state for the callback's class that belongs to no callback here. To be
  /// called if `saved_` has no state under the callback's key.
  bool warn_of_lost_state(const Callback& callback, const std::string& key) const;

  std::vector<std::shared_ptr<Callback>> callbacks_;  ///< the callbacks of the run, then the added ones
  std::size_t run_callbacks_ = 0;                     ///< number of the callbacks of the run
  bool begun_ = false;
  Json saved_ = {};
  std::vector<Json> before_report_ = {};  ///< each callback's state from before the report
};

}  // namespace muster::detail::observe
