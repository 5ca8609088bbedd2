// What follows a run and may end it: users derive their own; muster/callbacks.hpp has some that are ready.
#pragma once

#include <muster/checkpoint.hpp>
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

/// Told of a run as it goes, on every worker, on the thread of the training function. What a callback throws ends
/// training as an exception of the training function does, except in on_failure(), after_exception() and on_end(),
/// where it is a warning.
///
/// One that counts something, and is to go on counting where a run is taken up again, gives it as its state(). The
/// first worker's is kept with each checkpoint, under the name of the class and name(). Several with the same names are
/// told apart by their order.
class Callback {
 public:
  virtual ~Callback() = default;

  /// An attempt of training begins: what was counted in one before is forgotten. A copy of the session may be kept
  /// until on_failure() or on_end(). Collective.
  virtual void on_start(Session& /*session*/) {}
  /// This epoch of session.epochs() is over. Not told where a job is killed between its last report and its end.
  virtual void on_epoch(std::int64_t /*epoch*/) {}
  /// A batch has been handed out that completes a step; so many steps are there with it.
  virtual void on_batch(std::int64_t /*global_step*/) {}
  /// A report, before its checkpoint is made: the row as in result.json but for checkpoint_dir_name, the same on all
  /// workers.
  virtual void on_report(const Json& /*row*/) {}
  /// The same report, after that: what each worker has given, by rank, and the checkpoint that was made with it.
  virtual void after_report(const std::vector<Json>& /*metrics*/, const std::optional<Checkpoint>& /*checkpoint*/) {}
  /// A checkpoint is there, by a report or because the run is asked to stop.
  virtual void on_checkpoint(const Checkpoint& /*checkpoint*/) {}
  /// This worker leaves training with that error, which may be another worker's, or a stop on request.
  virtual void on_failure(const Error& /*error*/) {}
  /// Training has failed, and all workers know of it: by rank, what each of them has thrown or, where it has left
  /// because of another's, what it has heard. The attempt is over, and another may follow.
  virtual void after_exception(const std::map<int, std::string>& /*errors*/) {}
  /// Training is done.
  virtual void on_end() {}

  /// What each report has besides what the training function gives, whose value wins; the mean over the workers as all.
  virtual Metrics metrics() { return {}; }

  /// Asked after each report, and where training goes on from a checkpoint: true on one worker ends training there, on
  /// all of them, as training that is done. An exception leads out of the training function.
  virtual bool should_stop() const { return false; }

  /// What it is configured for, as "val_loss min"; empty if that does not matter for its state. Where a run goes on, a
  /// callback gets the state that was kept under its name. If the checkpoint has one of its class, but none under its
  /// name, a warning says so, and a callback with a name gets null: it begins anew.
  virtual std::string name() const { return {}; }
  /// What load_state() takes, on every worker after on_start(); null for nothing.
  virtual Json state() const { return nullptr; }
  virtual void load_state(const Json& /*state*/) {}
};

}  // namespace muster
