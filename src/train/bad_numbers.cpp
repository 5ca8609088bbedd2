#include "train/bad_numbers.hpp"

#include "base/log.hpp"
#include "gradients/data_parallel.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::train {
namespace {

std::string counted_steps(int count) { return std::to_string(count) + (count == 1 ? " step was" : " steps were"); }

}  // namespace

bool BadSteps::go_back(const Communicator& world, const std::optional<Place>& here) {
  const auto of_rank = here.value_or(Place{-1, -1, -1});
  std::array<std::int64_t, 3> place{of_rank.global_step, of_rank.optimizer, of_rank.call};
  world.all_reduce(std::span(place), ReduceOp::max);
  if (place[1] < 0) return false;
  left_out.insert({place[0], static_cast<int>(place[1]), place[2]});
  ++gone_back;
  return true;
}

BadNumbersWatch::BadNumbersWatch(const FailureConfig& config, Communicator control,
                                 std::shared_ptr<const step::Steps> steps, BadSteps& record)
    : policy_(config.bad_numbers),
      limit_(config.bad_numbers_limit),
      control_(std::move(control)),
      steps_(std::move(steps)),
      record_(record) {}

bool BadNumbersWatch::begin_step(int optimizer) {
  if (std::exchange(global_step_, steps_->global_step) != steps_->global_step) calls_.clear();
  current_ = {global_step_, optimizer, calls_[optimizer]++};
  if (!record_.left_out.contains(current_)) return true;
  ++left_out_;
  last_left_out_ = "step " + std::to_string(global_step_) + ", for which training has gone back";
  return false;
}

bool BadNumbersWatch::any_rank(bool bad) const { return control_.all_reduce(std::int64_t{bad}, ReduceOp::max) != 0; }

void BadNumbersWatch::bad(int optimizer, const std::string& where, const std::string& own, bool together) {
  std::string fact;
  if (together) {
    const auto owns = control_.all_gather(own);
    for (std::size_t r = 0; r < owns.size() && fact.empty(); ++r)
      if (!owns[r].empty())
        fact = "the gradient of parameter " + owns[r] + " on rank " + std::to_string(r) + " (" +
               control_.topology().hosts[r] + ")";
    for (const auto& averaged : fact.empty() ? control_.all_gather(where) : std::vector<std::string>())
      if (fact.empty() && !averaged.empty()) fact = "the averaged gradient of parameter " + averaged;
    if (fact.empty()) fact = "an average of finite gradients";
  } else {
    fact = "the averaged gradient of parameter " + where;
  }
  last_left_out_ = "step " + std::to_string(global_step_) + ": " + fact;
  fact += " is NaN or infinite in step " + std::to_string(global_step_);
  const auto end = [&](const char* remedy) {
    const Error error(ExitCode::user_error, "stepping an optimizer", fact, remedy);
    throw together ? Error(error.code(), std::string(error.what())) : error;
  };
  constexpr const char* look = "Look at the data of that step, the learning rate and what the loss divides by";
  if (policy_ == BadNumbers::stop) end(look);
  if (policy_ == BadNumbers::skip) {
    ++left_out_;
    if (++in_a_row_[optimizer] <= limit_ || limit_ < 0) return;
    fact += ", as in the " + std::to_string(limit_) + " before it, which were left out";
    end(look);
  }
  if (limit_ >= 0 && record_.gone_back >= limit_) {
    fact += ", and training has gone back " + std::to_string(limit_) + " times since the last checkpoint";
    end(look);
  }
  goes_back_ = current_;
  end("Going back to the newest checkpoint, to leave that step out");
}

int BadNumbersWatch::watch(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) watched_.insert(parameter.unsafeGetTensorImpl());
  return optimizers_++;
}

void BadNumbersWatch::require_watched(const std::vector<std::shared_ptr<gradients::DataParallel>>& models) {
  for (; required_ < models.size(); ++required_) {
    const auto reducer = models[required_]->reducer();
    if (!reducer) continue;
    if (reducer->passes() == 0) return;
    if (std::ranges::none_of(models[required_]->module()->parameters(), [&](const at::Tensor& parameter) {
          return watched_.contains(parameter.unsafeGetTensorImpl());
        }))
      throw Error(ExitCode::usage, "looking for NaN and infinite numbers (bad_numbers)",
                  "the optimizer of a prepared model is not prepared", "Give it to session.prepare_optimizer");
  }
}

void BadNumbersWatch::saved() {
  calls_.clear();
  record_ = {};
}

void BadNumbersWatch::warn() {
  const int count = std::exchange(left_out_, 0);
  if (count > 0 && control_.rank() == 0)
    log::warn(counted_steps(count) +
              " left out since the last report, as gradients were NaN or infinite; the last one: " + last_left_out_);
}

}  // namespace muster::detail::train
