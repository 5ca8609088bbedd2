// Handles gradients with NaN or infinite numbers, in the way that FailureConfig::bad_numbers sets.
#pragma once

#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "optim/bad_number_policy.hpp"
#include "session/attempt_end.hpp"
#include "session/weak_tensor.hpp"
#include "step/steps.hpp"

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace muster::detail::gradients {
class PreparedModel;
}

namespace muster::detail::session {

/// The optimizer steps with bad gradients because of which training has gone back to the newest checkpoint
/// (BadNumbers::roll_back). Kept from one attempt of a job to the next, which skips them; forgotten when a newer
/// checkpoint is saved.
struct BadSteps {
  /// Identifies a step of an optimizer, so that it is recognised after a rollback: the global step, the optimizer's
  /// number, and how often this optimizer has stepped since the global step last changed or, if that was later, since
  /// the last checkpoint was saved or the attempt began.
  struct OptimizerStepId {
    std::int64_t global_step = 0;
    int optimizer = 0;
    std::int64_t step_in_global_step = 0;
    auto operator<=>(const OptimizerStepId&) const = default;
  };
  std::set<OptimizerStepId> to_skip = {};  ///< the steps that the next attempts skip
  int rollback_count = 0;                  ///< number of rollbacks since the last checkpoint

  /// Call it when an attempt has ended with an error. True if any rank wants to go back because of a bad step; that
  /// step is skipped from then on. `here`: the bad step that has ended the attempt on this rank; none if something else
  /// has ended it here. Collective over the launch.
  bool agree_to_roll_back(const Communicator& world, const std::optional<OptimizerStepId>& here);
};

/// Handles bad gradients of the prepared optimizers, in one attempt on one worker: follows the policy, numbers the
/// optimizers and their steps, and counts the skipped steps.
class BadNumbersWatch final : public optim::BadNumberPolicy {
 public:
  /// `control`: the communicator for reports and checkpoints. `record`: must outlive this object and later attempts.
  BadNumbersWatch(const FailureConfig& config, Communicator control, std::shared_ptr<const step::Steps> steps,
                  BadSteps& record, std::shared_ptr<AttemptEnd> attempt_end);

  bool always_throws() const noexcept override { return policy_ != BadNumbers::skip; }
  bool begin_step(int optimizer) override;
  bool any_rank(bool bad) const override;
  void note_bad_gradient(int optimizer, const std::string& where, const std::string& own, bool together) override;
  void note_good_step(int optimizer) override { in_a_row_[optimizer] = 0; }

  /// Call it when an optimizer has been prepared. Returns the optimizer's number.
  int add_optimizer(const torch::optim::Optimizer& optimizer);
  /// Throws an Error if gradients of a prepared model were averaged but no prepared optimizer has its parameters. Call
  /// it at each boundary; each model is checked once.
  void require_watched(const std::vector<std::shared_ptr<gradients::PreparedModel>>& models);
  /// Call it after a checkpoint was committed: training never goes back further.
  void note_checkpoint();
  /// If steps were skipped since the last call, logs a warning on the first worker.
  void warn_of_skipped_steps();
  /// The step because of which this attempt ends and training goes back to the newest checkpoint; none if there is no
  /// such step.
  const std::optional<BadSteps::OptimizerStepId>& rollback_step() const noexcept { return rollback_step_; }

 private:
  BadNumbers policy_;
  int limit_;  ///< FailureConfig::bad_numbers_limit; negative for no limit
  Communicator control_;
  std::shared_ptr<const step::Steps> steps_;
  BadSteps& record_;
  std::shared_ptr<AttemptEnd> attempt_end_;  ///< shared, since optimizers may outlive the session
  BadSteps::OptimizerStepId current_;
  std::int64_t global_step_ = -1;
  std::map<int, std::int64_t> step_counts_;  ///< by optimizer: its steps since global_step_ last changed
  std::map<int, int> in_a_row_;              ///< steps skipped in a row, by optimizer
  int skipped_ = 0;                          ///< steps skipped since the last warning
  std::string last_skipped_;                 ///< describes the last skipped step, for the warning
  std::optional<BadSteps::OptimizerStepId> rollback_step_;
  int optimizer_count_ = 0;         ///< number of prepared optimizers
  std::set<WeakTensor> watched_;    ///< parameters of the prepared optimizers
  std::size_t checked_models_ = 0;  ///< number of models that require_watched() has checked
};

}  // namespace muster::detail::session
