#include "session/bad_numbers.hpp"

#include "base/log.hpp"
#include "gradients/prepared_model.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::session {
namespace {

std::string counted_steps(int count) { return str(count, count == 1 ? " step was" : " steps were"); }

}  // namespace

bool BadSteps::agree_to_roll_back(const Communicator& world, const std::optional<OptimizerStepId>& here) {
  const auto of_rank = here.value_or(OptimizerStepId{-1, -1, -1});
  std::array<std::int64_t, 3> step_id{of_rank.global_step, of_rank.optimizer, of_rank.step_in_global_step};
  world.all_reduce(std::span(step_id), ReduceOp::max);
  if (step_id[1] < 0) return false;
  to_skip.insert({step_id[0], static_cast<int>(step_id[1]), step_id[2]});
  ++rollback_count;
  return true;
}

BadNumbersWatch::BadNumbersWatch(const FailureConfig& config, Communicator control,
                                 std::shared_ptr<const step::Steps> steps, BadSteps& record,
                                 std::shared_ptr<AttemptEnd> attempt_end)
    : policy_(config.bad_numbers),
      limit_(config.bad_numbers_limit),
      control_(std::move(control)),
      steps_(std::move(steps)),
      record_(record),
      attempt_end_(std::move(attempt_end)) {}

bool BadNumbersWatch::begin_step(int optimizer) {
  attempt_end_->throw_if_ended();
  if (std::exchange(global_step_, steps_->global_step) != steps_->global_step) step_counts_.clear();
  current_ = {global_step_, optimizer, step_counts_[optimizer]++};
  if (!record_.to_skip.contains(current_)) return true;
  ++skipped_;
  last_skipped_ = str("step ", global_step_, ", for which training has gone back");
  return false;
}

bool BadNumbersWatch::any_rank(bool bad) const { return control_.all_reduce(std::int64_t{bad}, ReduceOp::max) != 0; }

void BadNumbersWatch::note_bad_gradient(int optimizer, const std::string& where, const std::string& own,
                                        bool together) {
  std::string fact;
  if (together) {
    const auto owns = control_.all_gather(own);
    for (std::size_t r = 0; r < owns.size() && fact.empty(); ++r)
      if (!owns[r].empty())
        fact = str("the gradient of parameter ", owns[r], " on rank ", r, " (", control_.topology().hosts[r], ")");
    for (const auto& averaged : fact.empty() ? control_.all_gather(where) : std::vector<std::string>())
      if (fact.empty() && !averaged.empty()) fact = "the averaged gradient of parameter " + averaged;
    if (fact.empty()) fact = "an average of finite gradients";
  } else {
    fact = "the averaged gradient of parameter " + where;
  }
  last_skipped_ = str("step ", global_step_, ": ", fact);
  fact += str(" is NaN or infinite in step ", global_step_);
  const auto end = [&](const char* remedy) {
    const Error error(ExitCode::user_error, "stepping an optimizer", fact, remedy);
    attempt_end_->end_with(together ? Error(error.code(), std::string(error.what())) : error);
  };
  constexpr const char* look = "Look at the data of that step, the learning rate and what the loss divides by";
  if (policy_ == BadNumbers::stop) end(look);
  if (policy_ == BadNumbers::skip) {
    ++skipped_;
    if (++in_a_row_[optimizer] <= limit_ || limit_ < 0) return;
    fact += str(", as in the ", limit_, " before it, which were left out");
    end(look);
  }
  if (limit_ >= 0 && record_.rollback_count >= limit_) {
    fact += str(", and training has gone back ", limit_, " times since the last checkpoint");
    end(look);
  }
  rollback_step_ = current_;
  end("Going back to the newest checkpoint, to leave that step out");
}

int BadNumbersWatch::add_optimizer(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) watched_.emplace(parameter.getIntrusivePtr());
  return optimizer_count_++;
}

void BadNumbersWatch::require_watched(const std::vector<std::shared_ptr<gradients::PreparedModel>>& models) {
  for (; checked_models_ < models.size(); ++checked_models_) {
    const auto reducer = models[checked_models_]->reducer();
    if (!reducer) continue;
    if (reducer->averaged_round_count() == 0) return;
    if (std::ranges::none_of(models[checked_models_]->module()->parameters(), [&](const at::Tensor& parameter) {
          return watched_.contains(WeakTensor(parameter.getIntrusivePtr()));
        }))
      throw Error(ExitCode::usage, "looking for NaN and infinite numbers (bad_numbers)",
                  "the optimizer of a prepared model is not prepared", "Give it to session.prepare_optimizer");
  }
}

void BadNumbersWatch::note_checkpoint() {
  step_counts_.clear();
  record_ = {};
}

void BadNumbersWatch::warn_of_skipped_steps() {
  const int count = std::exchange(skipped_, 0);
  if (count > 0 && control_.rank() == 0)
    log::warn(counted_steps(count) +
              " left out since the last report, as gradients were NaN or infinite; the last one: " + last_skipped_);
}

}  // namespace muster::detail::session
