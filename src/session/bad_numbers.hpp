// Handles gradients with NaN or infinite numbers, as FailureConfig::bad_numbers says.
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

/// The optimizer steps with bad gradients, over all attempts of a job.
struct BadSteps {
  /// Identifies a step of an optimizer, so that training that has gone back recognises it: the global step, and the
  /// number of the optimizer's calls in it since training began or the last checkpoint.
  struct OptimizerStepId {
    std::int64_t global_step = 0;
    int optimizer = 0;
    std::int64_t step_in_global_step = 0;
    auto operator<=>(const OptimizerStepId&) const = default;
  };
  std::set<OptimizerStepId> skipped = {};  ///< these steps are skipped
  int rollback_count = 0;                  ///< how often training has gone back since the last checkpoint

  /// Call when an attempt has ended. True if any rank goes back for a step; the step is then left out. `here` is this
  /// rank's step, if it knows one: the alarm may have ended it before. Collective over the launch.
  bool agree_to_roll_back(const Communicator& world, const std::optional<OptimizerStepId>& here);
};

/// Watches the optimizers of one attempt on one worker. Many members: the policy, the optimizers, and the counts of
/// steps that were left out.
class BadNumbersWatch final : public optim::BadNumberPolicy {
 public:
  /// `control` is the channel for reports and checkpoints; `record` lives over all attempts.
  BadNumbersWatch(const FailureConfig& config, Communicator control, std::shared_ptr<const step::Steps> steps,
                  BadSteps& record, std::shared_ptr<AttemptEnd> attempt_end);

  bool always_throws() const noexcept override { return policy_ != BadNumbers::skip; }
  bool begin_step(int optimizer) override;
  bool any_rank(bool bad) const override;
  void note_bad_gradient(int optimizer, const std::string& where, const std::string& own, bool together) override;
  void note_good_step(int optimizer) override { in_a_row_[optimizer] = 0; }

  /// Call when an optimizer has been prepared. Returns its number.
  int add_optimizer(const torch::optim::Optimizer& optimizer);
  /// Throws an Error if one of the models has been trained and no prepared optimizer steps it.
  void require_watched(const std::vector<std::shared_ptr<gradients::PreparedModel>>& models);
  /// Call after a checkpoint: training never goes back to before it.
  void note_checkpoint();
  /// Warns on the first worker of the steps that were left out since the last call.
  void warn_of_skipped_steps();
  /// The step for which this attempt ends, so that training goes back to the newest checkpoint.
  const std::optional<BadSteps::OptimizerStepId>& rollback_step() const noexcept { return rollback_step_; }

 private:
  BadNumbers policy_;
  int limit_;
  Communicator control_;
  std::shared_ptr<const step::Steps> steps_;
  BadSteps& record_;
  std::shared_ptr<AttemptEnd> attempt_end_;  ///< shared, since optimizers may outlive the session
  BadSteps::OptimizerStepId current_;
  std::int64_t global_step_ = -1;
  std::map<int, std::int64_t> step_counts_;  ///< steps of each optimizer in this global step
  std::map<int, int> in_a_row_;              ///< steps left out in a row, by optimizer
  int skipped_ = 0;                          ///< steps since the last warning
  std::string last_skipped_;                 ///< text for the warning
  std::optional<BadSteps::OptimizerStepId> rollback_step_;
  int optimizers_ = 0;
  std::set<WeakTensor> watched_;  ///< parameters of the prepared optimizers
  std::size_t required_ = 0;      ///< number of models that require_watched() has checked
};

}  // namespace muster::detail::session
