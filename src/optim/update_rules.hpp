// The next step of torch's optimizers as plain numbers, and access to the tensors of their state.
#pragma once

#include "optim/kernels.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <variant>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace muster::detail::optim {

/// What the next step of one parameter computes.
struct Rule {
  std::variant<SgdRule, AdamRule> rule;
  std::vector<at::Tensor>
      state_tensors;  ///< the momentum, or the two moments; empty before the first step or if not needed
};

/// Returns a hash of the rule's numbers. It is equal on all ranks if the ranks' optimizers have the same options and
/// the same number of steps.
std::uint64_t hash_of(const Rule& rule);

/// Returns the number of state tensors that a step by this rule writes.
std::size_t state_tensor_count(const Rule& rule);

/// Returns the greatest number of state tensors of a parameter with the present options; -1 if the optimizer cannot be
/// fused.
int state_tensor_count(torch::optim::Optimizer& optimizer);

/// Properties of an optimizer's type. For classes derived from torch's optimizers the defaults hold, since they may
/// step differently.
struct StepKind {
  bool has_rule = false;     ///< true if next_rules() knows how the optimizer steps, so that it can be fused
  bool may_evaluate = true;  ///< true if step() may call its closure more than once
};
StepKind step_kind(const torch::optim::Optimizer& optimizer);

/// Returns the rule of each parameter's next step, in the order of `parameters`. The optimizer must have all of them.
std::vector<Rule> next_rules(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters);

/// Records a step that was taken: increases Adam's step count and stores `state` as the parameter's state in the
/// optimizer.
void record_step(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const Rule& rule,
                 std::span<const at::Tensor> state);

/// Replaces each tensor of the optimizer's state by the result of `with`.
void replace_state(torch::optim::Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor& state)>& with);

}  // namespace muster::detail::optim
