// The optimizers that muster knows, and the names of their fields: the options of a parameter group and the state of a
// parameter. Checkpoints save exactly these fields. Optimizers that can be fused also have a rule in update_rules.cpp.
//
//   visit_fields(options, [](const char* name, auto& value) { … });   // `value` is const if `options` is const
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace muster::detail::optim {

template <class O, class GroupOptions, class ParamState>
struct OptimizerKind {
  using Optimizer = O;
  using Options = GroupOptions;
  using State = ParamState;
  const char* name;
};
inline constexpr std::tuple optimizer_kinds{
    OptimizerKind<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState>{"SGD"},
    OptimizerKind<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>{"Adam"},
    OptimizerKind<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>{"AdamW"},
    OptimizerKind<torch::optim::Adagrad, torch::optim::AdagradOptions, torch::optim::AdagradParamState>{"Adagrad"},
    OptimizerKind<torch::optim::RMSprop, torch::optim::RMSpropOptions, torch::optim::RMSpropParamState>{"RMSprop"},
    OptimizerKind<torch::optim::LBFGS, torch::optim::LBFGSOptions, torch::optim::LBFGSParamState>{"LBFGS"}};

/// Calls use(kind) with the entry of optimizer_kinds that fits the optimizer; returns false if none does.
bool with_optimizer_kind(torch::optim::Optimizer& optimizer, auto&& use) {
  const auto is = [&]<class K>(const K& kind) {
    return dynamic_cast<typename K::Optimizer*>(&optimizer) != nullptr && (use(kind), true);
  };
  return std::apply([&](const auto&... each) { return (is(each) || ...); }, optimizer_kinds);
}

/// True if T, without const, is one of the types `Of...`.
template <class T, class... Of>
concept Either = (std::same_as<std::remove_const_t<T>, Of> || ...);

void visit_fields(Either<torch::optim::SGDOptions> auto& options, auto&& field) {
  field("lr", options.lr());
  field("momentum", options.momentum());
  field("dampening", options.dampening());
  field("weight_decay", options.weight_decay());
  field("nesterov", options.nesterov());
}
void visit_fields(Either<torch::optim::SGDParamState> auto& state, auto&& field) {
  field("momentum_buffer", state.momentum_buffer());
}

void visit_fields(Either<torch::optim::AdamOptions, torch::optim::AdamWOptions> auto& options, auto&& field) {
  field("lr", options.lr());
  field("betas", options.betas());
  field("eps", options.eps());
  field("weight_decay", options.weight_decay());
  field("amsgrad", options.amsgrad());
}
void visit_fields(Either<torch::optim::AdamParamState, torch::optim::AdamWParamState> auto& state, auto&& field) {
  field("step", state.step());
  field("exp_avg", state.exp_avg());
  field("exp_avg_sq", state.exp_avg_sq());
  field("max_exp_avg_sq", state.max_exp_avg_sq());
}

void visit_fields(Either<torch::optim::AdagradOptions> auto& options, auto&& field) {
  field("lr", options.lr());
  field("lr_decay", options.lr_decay());
  field("weight_decay", options.weight_decay());
  field("initial_accumulator_value", options.initial_accumulator_value());
  field("eps", options.eps());
}
void visit_fields(Either<torch::optim::AdagradParamState> auto& state, auto&& field) {
  field("step", state.step());
  field("sum", state.sum());
}

void visit_fields(Either<torch::optim::RMSpropOptions> auto& options, auto&& field) {
  field("lr", options.lr());
  field("alpha", options.alpha());
  field("eps", options.eps());
  field("weight_decay", options.weight_decay());
  field("momentum", options.momentum());
  field("centered", options.centered());
}
void visit_fields(Either<torch::optim::RMSpropParamState> auto& state, auto&& field) {
  field("step", state.step());
  field("square_avg", state.square_avg());
  field("momentum_buffer", state.momentum_buffer());
  field("grad_avg", state.grad_avg());
}

void visit_fields(Either<torch::optim::LBFGSOptions> auto& options, auto&& field) {
  field("lr", options.lr());
  field("max_iter", options.max_iter());
  field("max_eval", options.max_eval());
  field("tolerance_grad", options.tolerance_grad());
  field("tolerance_change", options.tolerance_change());
  field("history_size", options.history_size());
  field("line_search_fn", options.line_search_fn());
}
/// LBFGS has one state for all its parameters, stored with the first parameter: its vectors have the elements of all
/// parameters.
void visit_fields(Either<torch::optim::LBFGSParamState> auto& state, auto&& field) {
  field("func_evals", state.func_evals());
  field("n_iter", state.n_iter());
  field("t", state.t());
  field("prev_loss", state.prev_loss());
  field("d", state.d());
  field("H_diag", state.H_diag());
  field("prev_flat_grad", state.prev_flat_grad());
  field("old_dirs", state.old_dirs());
  field("old_stps", state.old_stps());
  field("ro", state.ro());
  field("al", state.al());
}

/// The shape of a state tensor: the parameter's shape; in LBFGS, also a single number or a vector over all parameters.
enum class FieldShape { parameter, scalar, all_parameters };

template <class State>
FieldShape shape_of_field(std::string_view field) {
  if (!std::same_as<State, torch::optim::LBFGSParamState>) return FieldShape::parameter;
  return field == "H_diag" || field == "ro" || field == "al" ? FieldShape::scalar : FieldShape::all_parameters;
}

/// Returns the sizes of a field of the parameter's state in this optimizer.
template <class State>
std::vector<std::int64_t> sizes_of_field(std::string_view field, const at::Tensor& parameter,
                                         const torch::optim::Optimizer& optimizer) {
  const auto shape = shape_of_field<State>(field);
  if (shape == FieldShape::scalar) return {};
  if (shape == FieldShape::parameter) return parameter.sizes().vec();
  std::int64_t total = 0;
  for (const auto& group : optimizer.param_groups())
    for (const auto& each : group.params()) total += each.numel();
  return {total};
}

}  // namespace muster::detail::optim
