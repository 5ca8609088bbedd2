// The implementation of an OperatorTrainer: one run, whose session is open from the constructor to shutdown().
#pragma once

#include "comm/timeout.hpp"
#include "muster/operator.hpp"
#include "operators/call_history.hpp"
#include "operators/operator_ranks.hpp"
#include "operators/registry.hpp"
#include "session/open_session.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::operators {

/// Calls are numbered, and every checkpoint holds the results of all calls so far. When a run is resumed, its main
/// makes the same calls again; those before the checkpoint are replayed, that is, they only return the saved results.
class OperatorRun {
 public:
  using Make = std::function<std::unique_ptr<TrainingOperator>()>;

  OperatorRun(Launch& launch, const Make& make, OperatorTrainerOptions options);
  ~OperatorRun();

  Json train(const TrainOptions& options);
  Json validate(const ValidateOptions& options);
  Json apply(const std::function<Json()>& function);
  Json apply(const std::function<Json(TrainingOperator&)>& function);
  void update_scheduler(double metric);
  StateDict state_dict();
  void load_state_dict(const StateDict& state);
  void save(const std::filesystem::path& path);
  void load(const std::filesystem::path& path);
  void shutdown(bool force);

  /// Runs a trial of a sweep, shuts the trainer down and returns the result.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  bool has_validation_loader() const noexcept { return parts_ != nullptr && parts_->validation.passes() != nullptr; }

  /// Throws an Error on a rank that does not train.
  TrainingOperator& local_operator();

 private:
  run::ResolvedOptions resolve_options();
  /// Opens the session and restores the run's checkpoint, if there is one. Collective over the workers.
  void open(const Make& make);
  /// OperatorRanks::run() with this session.
  std::string run_on_all(const std::function<std::string()>& work) { return ranks_.run(work, session_.get()); }
  /// The next call of main. Runs `check` and then `work` and saves the result, or replays the call:
  /// returns or throws what was saved. `check` throws to refuse a call before anything is changed; that is saved, too.
  /// Collective.
  Json run_or_replay(Call call, const std::function<void()>& check, const std::function<Json()>& work);
  /// Throws an Error, the same on all workers, if they have given a call different options. Collective over the
  /// workers.
  template <class Options>
  void require_same(const char* call, const Options& options) const;
  /// Returns or throws the saved result of main's next call. Throws an Error if that was another call.
  Json replay(Call call, const CallRecord& before);
  /// Throws an Error: main's calls are not those of the run. Leaves the cause in error.txt, and params.json as before.
  [[noreturn]] void refuse_calls(const std::string& fact);
  /// Writes params.json as it was before this start, on rank 0.
  void restore_params() noexcept;
  /// The metrics for a row, without objects and without num_samples, which each row has. A report refuses those with
  /// other reserved names. `epoch` is the number of passes that train() has begun.
  Metrics row_metrics(const Json& result) const;
  /// Combines the workers' metrics into the result of the call, saves that as its result, and reports it unless
  /// this is a trial. `saves`: the report saves a checkpoint. Collective over the workers.
  Json finish_call(Call call, const Metrics& own, bool reduce, bool saves);
  /// True if a callback has ended training. Collective.
  bool has_ended();
  /// Reports the result of `step`, the step of a trial. Calls inside it report nothing.
  void report_step(const std::function<Json()>& step);
  /// The values of all workers. Collective over the workers.
  Json gather(const Json& own) const;
  /// Makes a replayed call that registered data once more, since no checkpoint holds data. Collective.
  void register_again(const std::function<Json(TrainingOperator&)>& function);
  /// Throws an Error unless a saved state fits the operator. The operator's own load functions may still refuse it.
  void require_fit(const StateDict& saved) const;
  /// Loads a saved state on every worker. Collective over the workers.
  void restore(const StateDict& saved);
  /// Updates params.json, on rank 0: the number of retries for `muster run`, and, if it `trains`, that the run is not
  /// finished.
  void update_params(int max_retries, bool trains = false);
  /// Prints the summary of the run, on rank 0.
  void print_summary() const;
  /// Restores the saved random state, once.
  void restore_random_state();

  // Many members, since this is a whole run: what it was started with, its session, its operator, and its calls.
  Launch& launch_;
  const OperatorTrainerOptions options_;
  bool saves_checkpoints_ = false;  ///< saves checkpoints, so that another process can resume the run
  bool keeps_folder_ = true;        ///< keeps the run's folder even if nothing was saved in it
  const run::ResolvedOptions resolved_;
  run::RunFolder run_;
  Json params_before_;  ///< params.json before this start; null in a new run
  const comm::ScopedTimeout everywhere_;
  at::Device device_;
  OperatorRanks ranks_;
  session::BadSteps bad_steps_;
  std::unique_ptr<session::OpenSession> session_;  ///< null if this rank does not train
  std::unique_ptr<TrainingOperator> operator_;
  OperatorRegistry* parts_ = nullptr;
  StateEntries entries_;                             ///< the entries of state_dict()
  std::shared_ptr<const StateEntries> run_entries_;  ///< entries_ and the calls: the entries of the run's checkpoints
  CallHistory history_;
  bool changed_ = false;      ///< a call other than train() has changed the state since it was saved
  bool of_trial_ = false;     ///< a trial of a sweep: reports its steps instead of its calls
  bool training_ = false;     ///< a call of train() is under way
  bool ended_ = false;        ///< a callback has ended training
  std::string random_state_;  ///< the checkpoint's, until restore_random_state()
  int exceptions_ = 0;        ///< std::uncaught_exceptions() in the constructor
};

}  // namespace muster::detail::operators
