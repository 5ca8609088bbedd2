// What stands behind an OperatorTrainer: one run, whose session is open from the constructor to shutdown().
#pragma once

#include "comm/world.hpp"
#include "muster/operator.hpp"
#include "train/open_session.hpp"
#include "train/operator_calls.hpp"
#include "train/operator_parts.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace muster::detail::train {

/// Calls are numbered, and what each has given is kept in every state that is saved. A run that is taken up again gives
/// that back, call by call, as far as the state goes that it has found.
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

  /// What a trial of a sweep comes to, and the end of the trainer.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  bool has_validation_loader() const noexcept { return parts_ != nullptr && parts_->validation.passes() != nullptr; }

  /// An Error on a rank that does not train.
  TrainingOperator& local_operator();

 private:
  Plan make_plan();
  /// Opens the session, and goes on from what was saved. Collective over the workers.
  void open(const Make& make);
  void require_open() const;
  /// The text that `work` gives, on all ranks; it is done by workers. What it throws is the end of the trainer.
  /// Collective.
  std::string meet(const std::function<std::string()>& work);
  /// Throws what `check` throws on any worker, the same on all ranks, and the trainer goes on. Collective.
  void require_on_all(const std::function<void()>& check);
  /// The next call of that name: `check` and then `work`, or what they gave before the run was taken up again. `check`
  /// refuses a call before anything is changed, which is noted too.
  Json call(const char* name, const std::function<void()>& check, const std::function<Json()>& work);
  comm::WaitLimits limits() const;
  /// The metrics of a row, which has names of its own. Its `epoch` is that of train().
  Metrics for_row(const Json& result) const;
  /// What the workers give, as one; noted as what the call of that name has given. Collective over the workers.
  Json conclude(const char* name, const Metrics& own, bool reduce, bool saves);
  /// Whether a callback wants no more training.
  bool has_ended();
  /// One report of what `step` gives, whose calls report nothing.
  void report_step(const std::function<Json()>& step);
  Json each_one(const Json& own) const;
  /// Makes a call again that has registered data before the run was taken up again. Collective.
  void register_again(const std::function<Json(TrainingOperator&)>& function);
  /// An Error unless a saved state fits the operator. Its own load functions may still refuse it.
  void require_fit(const StateDict& saved) const;
  /// What a saved state has, loaded by every worker. Collective over the workers.
  void restore(const StateDict& saved);
  /// In the run's folder, as rank 0: for `muster run` how many lost ranks are allowed for, and that a finished run goes
  /// on.
  void note(int max_retries, bool trains = false);
  /// Goes back to the random state that was saved, if it has not yet.
  void take_up_random_state();

  Launch& launch_;
  const OperatorTrainerOptions options_;
  bool keeps_ = false;         ///< saves the state for a process that takes the run up again
  bool leaves_folder_ = true;  ///< where nothing was saved in it, too
  const Plan plan_;
  RunFolder run_;
  const comm::TimeLimit everywhere_;
  at::Device device_;
  BadSteps bad_steps_;
  std::unique_ptr<OpenSession> session_;  ///< null where this rank does not train
  std::unique_ptr<TrainingOperator> operator_;
  OperatorParts* parts_ = nullptr;
  StateEntries entries_;                       ///< what state_dict() has
  std::shared_ptr<const StateEntries> saved_;  ///< and what a run needs to go on
  OperatorCalls done_;                         ///< by main in this process, or before the run was taken up again
  std::size_t calls_ = 0;                      ///< made by main in this process
  bool changed_ = false;                       ///< by another call than train(), since the state was saved
  bool of_trial_ = false;                      ///< steps are reported, and not each call
  bool training_ = false;                      ///< a call of train() is under way
  bool ended_ = false;                         ///< by a callback
  std::string random_state_;                   ///< of the state that was gone on from, until it is due
  bool open_ = false;
  int exceptions_ = 0;  ///< under way when it began
};

}  // namespace muster::detail::train
