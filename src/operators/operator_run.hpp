// The implementation of an OperatorTrainer: one run, and main's calls, which all ranks make.
#pragma once

#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "muster/operator.hpp"
#include "operators/call_history.hpp"
#include "operators/operator_worker.hpp"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::operators {

/// Calls are numbered, and every checkpoint holds the results of all calls so far. When a run is resumed, its main
/// makes the same calls again; those before the checkpoint are replayed, that is, they only return the saved results.
/// All member functions are collective over the launch unless they say otherwise.
class OperatorRun {
 public:
  using Check = std::function<void(OperatorWorker&)>;
  using Work = std::function<Json(OperatorWorker&)>;

  OperatorRun(Launch& launch, const OperatorWorker::Make& make, const OperatorTrainerOptions& options);
  ~OperatorRun();

  /// The next call of main. Runs `check` and then `work` on the workers and saves the result, or replays the call:
  /// returns or throws what was saved. `check` throws to refuse a call before anything is changed; that is saved, too.
  Json run_or_replay(Call call, const Check& check, const Work& work);
  /// Runs `work` on the workers outside of these calls, and returns its text on all ranks. If it throws on any worker,
  /// the trainer has ended and all ranks throw; the workers' sessions then fail at once.
  std::string run_on_all(const std::function<std::string(OperatorWorker&)>& work) {
    return run([&] { return work(*worker_); });
  }
  /// The saved result of main's next call; null if that is a new one. Not collective.
  const CallRecord* saved_call() const { return history_.next(); }
  StateDict state_dict();
  /// Runs a trial of a sweep, shuts the trainer down and returns the result.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  void shutdown(bool force);
  /// Throws an Error on a rank that does not train. Not collective.
  OperatorWorker& worker() const;

 private:
  /// Throws an Error unless the trainer is open: until work throws, a rank is lost, or it is shut down.
  void require_open() const;
  std::string run(const std::function<std::string()>& work);
  /// Runs `work` on the workers. Returns the error if it throws on any, the same on all ranks. Otherwise all ranks get
  /// the workers' `result`, if it is given.
  std::optional<Error> attempt(const std::function<void()>& work, std::string* result = nullptr);
  /// Returns or throws the saved result of main's next call. Throws an Error if that was another call.
  Json replay(Call call, const CallRecord& before);
  /// Throws an Error: main's calls are not those of the run. Leaves the cause in error.txt, and params.json as before.
  [[noreturn]] void refuse_calls(const std::string& fact);
  /// Writes params.json as it was before this start, on rank 0.
  void restore_params() noexcept;
  /// True if the run's folder stays even if nothing was saved in it.
  bool keeps_folder() const { return saves_checkpoints(resolved_.flags) || resolved_.flags.storage; }

  const run::ResolvedOptions resolved_;
  run::RunFolder run_;
  const comm::ScopedTimeout everywhere_;
  bool is_open_ = true;
  const Json params_before_;  ///< params.json before this start; null in a new run
  CallHistory history_;
  std::unique_ptr<OperatorWorker> worker_;  ///< null if this rank does not train
  bool of_trial_ = false;                   ///< a trial of a sweep: reports its steps instead of its calls
  bool ended_ = false;                      ///< a callback has ended training
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace muster::detail::operators
