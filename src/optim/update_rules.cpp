#include "optim/update_rules.hpp"

#include "gradients/tensor_changes.hpp"
#include "optim/fields.hpp"

#include <algorithm>
#include <array>
#include <concepts>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <typeinfo>

namespace muster::detail::optim {
namespace {

namespace o = torch::optim;

// For each optimizer that can be fused, there are three functions. state_tensor_count() returns the number of state
// tensors that the options need, or -1 if they cannot be fused. rule_of() returns the rule of a parameter's next step;
// `saved` is null before the first step. keep() stores the state after a step.

int state_tensor_count(const o::OptimizerOptions&) { return -1; }

int state_tensor_count(const o::SGDOptions& options) { return options.momentum() != 0 ? 1 : 0; }
Rule rule_of(const o::SGDOptions& options, const o::SGDParamState* saved) {
  SgdRule rule{.lr = options.lr(),
               .momentum = options.momentum(),
               .dampening = options.dampening(),
               .weight_decay = options.weight_decay(),
               .nesterov = options.nesterov()};
  rule.first = rule.momentum != 0 && (saved == nullptr || !saved->momentum_buffer().defined());
  return {rule, rule.momentum == 0 || rule.first ? std::vector<at::Tensor>() : std::vector{saved->momentum_buffer()}};
}
void keep(const SgdRule&, o::SGDParamState& kept, std::span<const at::Tensor> state) { kept.momentum_buffer(state[0]); }

int state_tensor_count(const Either<o::AdamOptions, o::AdamWOptions> auto& options) {
  return options.amsgrad() ? -1 : 2;
}
template <Either<o::AdamOptions, o::AdamWOptions> Options>
Rule rule_of(const Options& options, const Either<o::AdamParamState, o::AdamWParamState> auto* saved) {
  AdamRule rule{.lr = options.lr(),
                .beta1 = std::get<0>(options.betas()),
                .beta2 = std::get<1>(options.betas()),
                .eps = options.eps(),
                .weight_decay = options.weight_decay(),
                .decoupled = std::same_as<Options, o::AdamWOptions>};
  rule.first = saved == nullptr || !saved->exp_avg().defined();
  if (rule.first) return {rule, {}};
  rule.step = saved->step() + 1;
  return {rule, {saved->exp_avg(), saved->exp_avg_sq()}};
}
void keep(const AdamRule& rule, Either<o::AdamParamState, o::AdamWParamState> auto& kept,
          std::span<const at::Tensor> state) {
  kept.step(rule.step);
  kept.exp_avg(state[0]);
  kept.exp_avg_sq(state[1]);
}

std::array<double, 7> numbers_of(const SgdRule& rule) {
  return {rule.lr,
          rule.momentum,
          rule.dampening,
          rule.weight_decay,
          static_cast<double>(rule.nesterov),
          static_cast<double>(rule.first)};
}
std::array<double, 7> numbers_of(const AdamRule& rule) {
  return {rule.lr,
          rule.beta1,
          rule.beta2,
          rule.eps,
          rule.weight_decay,
          static_cast<double>(rule.decoupled),
          static_cast<double>(rule.step)};
}

}  // namespace

std::uint64_t hash_of(const Rule& rule) {
  const auto numbers = std::visit([](const auto& of_kind) { return numbers_of(of_kind); }, rule.rule);
  return gradients::hash_of(numbers.data(), sizeof numbers, rule.rule.index());
}

std::size_t state_tensor_count(const Rule& rule) {
  return std::visit([](const auto& of_kind) { return of_kind.state_tensor_count(); }, rule.rule);
}

int state_tensor_count(o::Optimizer& optimizer) {
  int most = -1;
  with_optimizer_kind(optimizer, [&]<class K>(const K&) {
    for (const auto& group : optimizer.param_groups()) {
      const int states = state_tensor_count(static_cast<const typename K::Options&>(group.options()));
      if (states < 0) return void(most = -1);
      most = std::max(most, states);
    }
  });
  return most;
}

StepKind step_kind(const o::Optimizer& optimizer) {
  StepKind kind;
  const auto look = [&]<class K>(const K&) {
    using Options = typename K::Options;
    if (typeid(optimizer) != typeid(typename K::Optimizer)) return;
    kind.has_rule = requires(const Options& options, const typename K::State* saved) { rule_of(options, saved); };
    kind.may_evaluate = std::same_as<typename K::Optimizer, o::LBFGS>;
  };
  std::apply([&](const auto&... each) { (look(each), ...); }, optimizer_kinds);
  return kind;
}

std::vector<Rule> next_rules(o::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  std::map<const void*, const o::OptimizerOptions*> options;
  for (auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) options[parameter.unsafeGetTensorImpl()] = &group.options();
  std::vector<Rule> rules;
  with_optimizer_kind(optimizer, [&]<class K>(const K&) {
    using Options = typename K::Options;
    using State = typename K::State;
    if constexpr (requires(const Options& of_group, const State* saved) { rule_of(of_group, saved); })
      for (const auto& parameter : parameters) {
        const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
        const auto* saved = found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
        rules.push_back(rule_of(static_cast<const Options&>(*options.at(parameter.unsafeGetTensorImpl())), saved));
      }
  });
  return rules;
}

void record_step(o::Optimizer& optimizer, const at::Tensor& parameter, const Rule& rule,
                 std::span<const at::Tensor> state) {
  if (state_tensor_count(rule) == 0) return;
  with_optimizer_kind(optimizer, [&]<class K>(const K&) {
    auto& kept = optimizer.state()[parameter.unsafeGetTensorImpl()];
    if (!kept) kept = std::make_unique<typename K::State>();
    auto& of_kind = static_cast<typename K::State&>(*kept);
    const auto keep_by = [&](const auto& by) {
      if constexpr (requires { keep(by, of_kind, state); }) keep(by, of_kind, state);
    };
    std::visit(keep_by, rule.rule);
  });
}

void replace_state(o::Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor&)>& with) {
  with_optimizer_kind(optimizer, [&]<class K>(const K&) {
    for (auto& [parameter, state] : optimizer.state())
      visit_fields(static_cast<typename K::State&>(*state), [&](const char*, auto& value) {
        if constexpr (std::same_as<std::remove_reference_t<decltype(value)>, at::Tensor>)
          if (value.defined()) value = with(value);
      });
  });
}

}  // namespace muster::detail::optim
