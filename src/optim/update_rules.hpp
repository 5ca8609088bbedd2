// What torch's optimizers would do in their next step, as plain numbers, and where their state lies.
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

/// Of one parameter.
struct Rule {
  std::variant<SgdRule, AdamRule> rule;
  std::vector<at::Tensor> state;  ///< the momentum, or the two moments; empty if there is none yet or none is needed
};

/// A hash of the rule's numbers, which are the same on all ranks if their optimizers are alike.
std::uint64_t hash_of(const Rule& rule);

/// How many tensors of state a step by that rule writes.
std::size_t states_of(const Rule& rule);

/// How many tensors of state a parameter has at most, with the options of now; -1 if the optimizer cannot be fused.
int states_of(torch::optim::Optimizer& optimizer);

/// The rule of each parameter's next step, in the order of `parameters`, all of which are the optimizer's.
std::vector<Rule> next_rules(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters);

/// The step has been done: counts it, and lets the optimizer have these tensors as the parameter's state.
void commit(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const Rule& rule,
            std::span<const at::Tensor> state);

/// Each tensor of the optimizer's state becomes what `with` gives for it.
void replace_state(torch::optim::Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor& state)>& with);

}  // namespace muster::detail::optim
