// The implementation of an OperatorTrainer: one run, and the calls of main(), which all ranks make.
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

/// Calls are numbered, and every checkpoint holds the results of all calls so far. When a run is resumed, its main()
/// makes the same calls again. The calls before the checkpoint are replayed: they only return the saved results. Member
/// functions are collective over the launch unless they say otherwise.
class OperatorRun {
 public:
  using Check = std::function<void(OperatorWorker&)>;
  using Work = std::function<Json(OperatorWorker&)>;

  OperatorRun(Launch& launch, const OperatorWorker::Make& make, const OperatorTrainerOptions& options);
  ~OperatorRun();

  /// Makes the next call of main(). A new call runs `check` and then `work` on the workers and saves the result. A
  /// replayed call returns or throws what was saved. `check` throws to refuse a call before anything is changed; the
  /// refusal is saved, too.
  Json run_or_replay(Call call, const Check& check, const Work& work);
  /// Runs `work` on the workers, without a record in the history, and returns its text on all ranks; the text must be
  /// the same on all workers. If it throws on any worker, all ranks throw and the trainer is closed; the workers'
  /// sessions have then failed.
  std::string run_on_all(const std::function<std::string(OperatorWorker&)>& work) {
    return run([&] { return work(*worker_); });
  }
  /// The saved result of main()'s next call; null if it is a new call. Not collective.
  const CallRecord* saved_call() const { return history_.next(); }
  StateDict state_dict();
  /// Runs a trial of a sweep, shuts the trainer down and returns the trial's result.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  void shutdown(bool force);
  /// Returns this rank's worker. Throws an Error on a rank that does not train. Not collective.
  OperatorWorker& worker() const;

 private:
  /// Throws an Error if the trainer is closed: since work has thrown, a rank was lost, or it was shut down.
  void require_open() const;
  std::string run(const std::function<std::string()>& work);
  /// Runs `work` on the workers. If it throws on any worker, returns the error, the same on all ranks. Otherwise, if
  /// `result` is given, gives the workers' text to all ranks.
  std::optional<Error> attempt(const std::function<void()>& work, std::string* result = nullptr);
  /// Returns or throws the saved result of main()'s next call. Throws an Error if the saved call was a different one.
  Json replay(Call call, const CallRecord& before);
  /// Throws an Error: main() makes other calls than those of the saved history. Writes the cause to error.txt, and
  /// restores params.json.
  [[noreturn]] void refuse_calls(const std::string& fact);
  /// On rank 0, writes params.json as it was before this start.
  void restore_params() noexcept;
  /// True if the run's folder must stay even if nothing was saved in it.
  bool keeps_folder() const { return saves_checkpoints(resolved_.flags) || resolved_.flags.storage; }

  const run::ResolvedOptions resolved_;
  run::RunFolder run_;
  const comm::ScopedTimeout everywhere_;
  bool is_open_ = true;
  const Json params_before_;  ///< contents of params.json before this start; null for a new run
  CallHistory history_;
  std::unique_ptr<OperatorWorker> worker_;  ///< null if this rank does not train
  bool of_trial_ = false;  ///< true in a trial of a sweep, which reports its steps instead of its calls
  bool ended_ = false;     ///< true if a callback has ended training
  /// Number of exceptions under way when the trainer was made. If there are more in the destructor, one destroys it.
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace muster::detail::operators
