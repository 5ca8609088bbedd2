#include "optim/update_rules.hpp"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>
#include <tuple>

namespace muster::detail::optim {
namespace {

namespace o = torch::optim;

template <class State>
State* state_of(o::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : static_cast<State*>(found->second.get());
}

template <class State>
State& made_state_of(o::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

Rule sgd_rule(o::Optimizer& optimizer, const o::SGDOptions& options, const at::Tensor& parameter) {
  SgdRule rule{.lr = options.lr(),
               .momentum = options.momentum(),
               .dampening = options.dampening(),
               .weight_decay = options.weight_decay(),
               .nesterov = options.nesterov()};
  std::vector<at::Tensor> state;
  if (rule.momentum != 0) {
    const auto* saved = state_of<o::SGDParamState>(optimizer, parameter);
    rule.first = saved == nullptr || !saved->momentum_buffer().defined();
    if (!rule.first) state.push_back(saved->momentum_buffer());
  }
  return {rule, std::move(state)};
}

template <class Options, class State>
Rule adam_rule(o::Optimizer& optimizer, const Options& options, const at::Tensor& parameter, bool decoupled) {
  AdamRule rule{.lr = options.lr(),
                .beta1 = std::get<0>(options.betas()),
                .beta2 = std::get<1>(options.betas()),
                .eps = options.eps(),
                .weight_decay = options.weight_decay(),
                .decoupled = decoupled};
  std::vector<at::Tensor> state;
  const auto* saved = state_of<State>(optimizer, parameter);
  rule.first = saved == nullptr || !saved->exp_avg().defined();
  if (!rule.first) {
    state = {saved->exp_avg(), saved->exp_avg_sq()};
    rule.step = saved->step() + 1;
  }
  return {rule, std::move(state)};
}

template <class Options>
bool without_amsgrad(o::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    if (static_cast<const Options&>(group.options()).amsgrad()) return false;
  return true;
}

}  // namespace

std::size_t states_of(const Rule& rule) {
  const auto* sgd = std::get_if<SgdRule>(&rule.rule);
  return sgd == nullptr ? 2 : sgd->momentum != 0 ? 1 : 0;
}

int states_of(o::Optimizer& optimizer) {
  if (dynamic_cast<o::SGD*>(&optimizer)) {
    for (auto& group : optimizer.param_groups())
      if (static_cast<const o::SGDOptions&>(group.options()).momentum() != 0) return 1;
    return 0;
  }
  if (dynamic_cast<o::Adam*>(&optimizer)) return without_amsgrad<o::AdamOptions>(optimizer) ? 2 : -1;
  if (dynamic_cast<o::AdamW*>(&optimizer)) return without_amsgrad<o::AdamWOptions>(optimizer) ? 2 : -1;
  return -1;
}

std::vector<Rule> next_rules(o::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  std::map<const void*, const o::OptimizerOptions*> options;
  for (auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) options[parameter.unsafeGetTensorImpl()] = &group.options();
  const bool sgd = dynamic_cast<o::SGD*>(&optimizer) != nullptr;
  const bool adam = dynamic_cast<o::Adam*>(&optimizer) != nullptr;
  std::vector<Rule> rules;
  for (const auto& parameter : parameters) {
    const auto& of_group = *options.at(parameter.unsafeGetTensorImpl());
    if (sgd)
      rules.push_back(sgd_rule(optimizer, static_cast<const o::SGDOptions&>(of_group), parameter));
    else if (adam)
      rules.push_back(adam_rule<o::AdamOptions, o::AdamParamState>(
          optimizer, static_cast<const o::AdamOptions&>(of_group), parameter, false));
    else
      rules.push_back(adam_rule<o::AdamWOptions, o::AdamWParamState>(
          optimizer, static_cast<const o::AdamWOptions&>(of_group), parameter, true));
  }
  return rules;
}

void commit(o::Optimizer& optimizer, const at::Tensor& parameter, const Rule& rule, std::span<const at::Tensor> state) {
  if (const auto* sgd = std::get_if<SgdRule>(&rule.rule)) {
    if (sgd->momentum != 0) made_state_of<o::SGDParamState>(optimizer, parameter).momentum_buffer(state[0]);
    return;
  }
  const auto& adam = std::get<AdamRule>(rule.rule);
  const auto put = [&](auto& saved) {
    saved.step(adam.step);
    saved.exp_avg(state[0]);
    saved.exp_avg_sq(state[1]);
  };
  if (adam.decoupled)
    put(made_state_of<o::AdamWParamState>(optimizer, parameter));
  else
    put(made_state_of<o::AdamParamState>(optimizer, parameter));
}

void own_state(o::Optimizer& optimizer, const std::function<bool(const at::Tensor&)>& shared) {
  const auto own = [&](at::Tensor& state) {
    if (state.defined() && shared(state)) state = state.clone();
  };
  for (auto& [parameter, state] : optimizer.state()) {
    if (auto* sgd = dynamic_cast<o::SGDParamState*>(state.get())) {
      own(sgd->momentum_buffer());
    } else if (auto* adam = dynamic_cast<o::AdamParamState*>(state.get())) {
      own(adam->exp_avg());
      own(adam->exp_avg_sq());
    } else if (auto* adamw = dynamic_cast<o::AdamWParamState*>(state.get())) {
      own(adamw->exp_avg());
      own(adamw->exp_avg_sq());
    }
  }
}

}  // namespace muster::detail::optim
