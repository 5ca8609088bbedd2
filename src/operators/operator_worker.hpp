// The operator on a rank that trains. Its session is open from the first call of main() to the last, and it carries out
// these calls.
#pragma once

#include "muster/operator.hpp"
#include "operators/call_history.hpp"
#include "operators/registry.hpp"
#include "run/run_folder.hpp"
#include "session/open_session.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace muster::detail::operators {

/// True if the trainer's run saves checkpoints, so that another process can resume it.
bool saves_checkpoints(const LaunchFlags& flags);

/// One worker of an operator's trainer. All member functions are collective over the workers, except getters.
class OperatorWorker {
 public:
  using Make = std::function<std::unique_ptr<TrainingOperator>()>;

  OperatorWorker(const run::ResolvedOptions& resolved, run::RunFolder& run, const Communicator& workers,
                 at::Device device, CallHistory& history);
  OperatorWorker(const OperatorWorker&) = delete;
  OperatorWorker& operator=(const OperatorWorker&) = delete;

  /// Opens the session, makes the operator, and restores the run's checkpoint if there is one.
  void open(const Make& make, const OperatorTrainerOptions& options);
  session::OpenSession& session() noexcept { return session_; }
  TrainingOperator& training_operator() const noexcept { return *operator_; }
  OperatorRegistry& registry() const { return OperatorRegistry::of(*operator_); }
  bool has_ended() noexcept { return session_.state().callback_end.has_ended(); }

  /// Makes main()'s next call: runs `work`, adds its result to the history, and returns it as text. The text is empty
  /// if a callback has ended training.
  std::string make_call(Call call, const std::function<Json(OperatorWorker&)>& work);
  /// Call it when the last saved result was returned. Restores the random state, so that main() draws the same random
  /// numbers as in a run that was not interrupted. If the checkpoint was saved inside train(), train() restores it.
  void end_replay();
  /// Makes this worker run a trial of a sweep: the session then reports the trial's steps instead of the calls.
  void begin_trial() noexcept { reports_calls_ = false; }

  // The calls of main(). Each check() throws an Error to refuse a call before anything is changed.
  void check(const TrainOptions& options);
  Json train(const TrainOptions& options);
  void check(const ValidateOptions& options);
  Json validate(const ValidateOptions& options);
  void require_plateau_scheduler() const;
  Json update_scheduler(double metric);
  /// Returns the values of all workers as a list.
  Json gather(const Json& own);
  Json apply(const std::function<Json(TrainingOperator&)>& function);
  /// Calls `function` once more to register its data, which no checkpoint holds; then restores the state from before
  /// the call.
  void register_again(const std::function<Json(TrainingOperator&)>& function);
  /// Returns the trainer's state as copies on the CPU.
  StateDict state_dict();
  void check(const StateDict& saved);
  Json restore(const StateDict& saved);
  void save(const std::filesystem::path& path);
  /// Reads the state that save() has written. Throws an Error if it does not fit the operator.
  StateDict read(const std::filesystem::path& path);
  /// Reports the result of a step of a trial.
  Json report_step(const Json& result);

 private:
  const session::WorkerContext& workers() const noexcept { return registry().state.workers; }
  /// Throws an Error if a saved state does not fit the operator. The operator's own load functions may refuse a state
  /// that fits.
  void require_fit(const StateDict& saved) const;
  /// Restores the random state of the checkpoint. Does nothing at further calls.
  void restore_random_state();
  /// Returns the metrics for a row of result.json: without num_samples, which each row has anyway, and without objects.
  /// (Objects with a reserved name are kept, so that the report refuses them.) Adds `epoch`, the number of passes that
  /// train() has begun.
  Metrics row_metrics(const Json& result) const;
  /// Combines the workers' metrics into the result of the call, adds it to the history, and reports it unless this is a
  /// trial. `saves`: true if the report saves a checkpoint.
  Json finish_call(Call call, const Metrics& own, bool reduce, bool saves);

  run::RunFolder& run_;
  CallHistory& history_;
  session::BadSteps bad_steps_;
  session::OpenSession session_;
  std::unique_ptr<TrainingOperator> operator_;
  StateEntries entries_;                             ///< the entries of state_dict()
  std::shared_ptr<const StateEntries> run_entries_;  ///< the entries of the run's checkpoints: entries_ and the calls
  const bool saves_checkpoints_;
  bool reports_calls_ = true;
  bool has_unsaved_change_ = false;  ///< true if a call other than train() has changed the state since it was saved
  bool is_training_ = false;  ///< true during a call of train(), and until one if the checkpoint was saved in train()
  std::string random_state_;  ///< random state of the checkpoint; empty when it was restored
};

/// Updates params.json on rank 0: under `muster run`, the number of retries; if `trains` is true, that the run is not
/// finished.
void update_params(const Communicator& world, run::RunFolder& run, int max_retries, bool trains = false);

}  // namespace muster::detail::operators
