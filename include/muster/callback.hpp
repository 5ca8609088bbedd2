// Callbacks that observe a run and may end it: derive your own; muster/callbacks.hpp has some that are ready to use.
#pragma once

#include <muster/checkpoint.hpp>
#include <muster/detail/export.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>
#include <muster/metrics.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster {

class Session;

/// Why a rank is late, as far as the kernel's counts and muster's clocks tell.
enum class LateCause {
  computation,  ///< its own computation takes longer, and no other cause was found
  shared_core,  ///< its threads are ready to run and have no core: other processes use it
  own_threads,  ///< other threads of its process use its core
  cpu_quota,    ///< its control group has used up its processor time
  hot_core,     ///< its core is slowed down because it is too hot
  memory,       ///< its pages are read back from swap, or from files that it maps
  data,         ///< it waits for its batches
  file_system,  ///< it waits for its batches, because reading files takes long
  saving,       ///< it takes longer to save its part of the checkpoints
};
/// Describes the cause in a few words, as in "its core is shared with other processes".
MUSTER_API std::string to_string(LateCause cause);

/// A worker for which the others wait in most steps.
struct LateRank {
  int rank = 0;  ///< the rank among the workers
  std::string host;
  LateCause cause = LateCause::computation;
  /// How much longer its own part of a step takes than the median of the other workers, as a fraction of the step; for
  /// LateCause::saving, its part of a save, as a fraction of the time from save to save.
  double behind = 0;
};

/// Receives the events of a run, on every worker unless a function says otherwise, on the thread of the training
/// function. What a callback throws ends training like an exception of the training function, except in
/// on_failed_report(), on_failure(), after_exception() and on_end(), where it is a warning.
///
/// A callback that must keep its counts when a run is continued returns them as its state(). The first worker's state
/// is saved with each checkpoint, under the callback's class and name(). Several callbacks with the same class and name
/// are told apart by their order.
class MUSTER_API Callback {
 public:
  virtual ~Callback() = default;

  /// An attempt of training begins: forget what was counted in an earlier one. A copy of the session may be kept until
  /// on_failure() or on_end(). Collective.
  virtual void on_start(Session& /*session*/) {}
  /// This epoch of session.epochs() is over. Not called if a job is killed between the epoch's last report and its end.
  virtual void on_epoch(std::int64_t /*epoch*/) {}
  /// A batch that completes a step has been handed out; `global_step` includes this step.
  virtual void on_batch(std::int64_t /*global_step*/) {}
  /// The other workers wait for `late.rank`: in 8 of the last 10 comparisons, its own part of a step took longer than
  /// the median of the other workers by more than 10% of the step. Fewer late comparisons are enough if the kernel's
  /// counts show that the rank had no core or no processor time. A comparison covers at least two steps and 20 ms.
  /// Saves have a rule of their own (LateCause::saving): in 8 of the last 10, its part took longer by more than 20 ms
  /// and 10% of the time since the save before. Called on the first worker only, and not again before the late worker
  /// was on time.
  virtual void on_late_rank(const LateRank& /*late*/) {}
  /// A report is being made, and its checkpoint comes next. `row` is its row of result.json without
  /// checkpoint_dir_name, the same on all workers.
  virtual void on_report(const Json& /*row*/) {}
  /// A report has failed and does not count. metrics() was called for it, and perhaps on_report(): undo what these
  /// calls have changed in the callback. `before` is what state() returned before these calls. By default, load_state()
  /// gets it unless it is null.
  virtual void on_failed_report(const Json& before) {
    if (!before.is_null()) load_state(before);
  }
  /// The report is complete. `metrics` has each worker's own metrics, by rank; `checkpoint` was made with the report.
  virtual void after_report(const std::vector<Json>& /*metrics*/, const std::optional<Checkpoint>& /*checkpoint*/) {}
  /// The checkpoint of an earlier report has been validated. `fields` has that report's training_iteration and the
  /// fields that the validation adds to its row. Called on the first worker only, during a later report. When a run
  /// continues, it is called again for the earlier validations.
  virtual void on_validated(const Json& /*fields*/) {}
  /// A checkpoint was committed, by a report or because the run was asked to stop.
  virtual void on_checkpoint(const Checkpoint& /*checkpoint*/) {}
  /// This worker leaves training with `error`, which may come from another worker, or be a stop on request.
  virtual void on_failure(const Error& /*error*/) {}
  /// Training has failed, and all workers know it. `errors` has an error text for each rank: of the exception that the
  /// rank has thrown or, if the rank left because another one failed, of the error that it received. The attempt is
  /// over, and another may follow.
  virtual void after_exception(const std::map<int, std::string>& /*errors*/) {}
  /// Training has ended, and no worker has had an error.
  virtual void on_end() {}

  /// Metrics added to each report, combined over the workers like all metrics. If the training function gives one of
  /// the same name, that one is used.
  virtual Metrics metrics() { return {}; }

  /// Called after each report, and when training continues from a checkpoint. True on one worker ends training on all
  /// of them, as finished; an exception leaves the training function.
  virtual bool should_stop() const { return false; }

  /// The name of the metric by which should_stop() decides, as long as no report has had this metric; otherwise empty.
  /// If all ranks train, validations run after training: then a report with validation that lacks this metric at an
  /// epoch's end is an Error (ExitCode::usage).
  virtual std::string decides_by() const { return {}; }

  /// What the callback is configured for, such as "val_loss min"; empty if its state does not depend on that. When a
  /// run continues, a callback gets the state that was saved under its name. If the checkpoint has a state of its class
  /// but none under its name, a warning says so, and a callback with a name gets null and begins anew.
  virtual std::string name() const { return {}; }
  /// The state for load_state(), which is called on every worker after on_start() if the checkpoint has a state for
  /// this callback; null: none.
  virtual Json state() const { return nullptr; }
  virtual void load_state(const Json& /*state*/) {}
};

}  // namespace muster
