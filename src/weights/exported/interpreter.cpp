#include "weights/exported/interpreter.hpp"

#include "muster/sync_batch_norm.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace muster::detail::weights::exported {
namespace {

using Kind = Operand::Kind;

/// The `with` blocks that are open.
class OpenScopes {
 public:
  OpenScopes(const Program& program, const Settings& settings) : program_(program), settings_(settings) {}
  OpenScopes(const OpenScopes&) = delete;
  OpenScopes& operator=(const OpenScopes&) = delete;
  ~OpenScopes() {
    while (!open_.empty()) leave();
  }

  /// Leaves and enters scopes until `scope` is the current one.
  void move_to(std::uint32_t scope) {
    while (!is_inside(scope, current())) leave();
    if (scope == current()) return;
    move_to(program_.scopes[scope].parent);
    enter(scope);
  }
  std::uint32_t current() const noexcept { return open_.empty() ? 0 : open_.back().scope; }

 private:
  struct Open {
    std::uint32_t scope;
    bool enabled, cache = true;  ///< before the scope was entered
    c10::DeviceType device = {};
    at::ScalarType dtype = {};
  };

  bool is_inside(std::uint32_t scope, std::uint32_t outer) const {
    while (scope > outer) scope = program_.scopes[scope].parent;  // a scope comes after its parent
    return scope == outer;
  }

  void enter(std::uint32_t number) {
    const auto& scope = program_.scopes[number];
    if (!scope.device) {
      open_.push_back({number, at::GradMode::is_enabled()});
      at::GradMode::set_enabled(scope.enabled);
      return;
    }
    namespace autocast = at::autocast;
    const auto device = settings_.device ? settings_.device->type() : *scope.device;
    open_.push_back({number, autocast::is_autocast_enabled(device), autocast::is_autocast_cache_enabled(), device,
                     autocast::get_autocast_dtype(device)});
    autocast::set_autocast_enabled(device, scope.enabled);
    if (scope.dtype) autocast::set_autocast_dtype(device, *scope.dtype);
    autocast::increment_nesting();
    autocast::set_autocast_cache_enabled(scope.cache);
  }

  void leave() {
    namespace autocast = at::autocast;
    const auto before = open_.back();
    open_.pop_back();
    if (!program_.scopes[before.scope].device) return at::GradMode::set_enabled(before.enabled);
    if (autocast::decrement_nesting() == 0) autocast::clear_cache();
    autocast::set_autocast_enabled(before.device, before.enabled);
    autocast::set_autocast_dtype(before.device, before.dtype);
    autocast::set_autocast_cache_enabled(before.cache);
  }

  const Program& program_;
  const Settings& settings_;
  std::vector<Open> open_;
};

/// The value of a slot, which is moved out at its last use.
c10::IValue take(const Operand& operand, std::vector<c10::IValue>& values) {
  auto& value = values[operand.slot];
  return operand.last_use ? std::move(value) : value;
}

c10::IValue list_of(const Operand& operand, std::vector<c10::IValue>& values, const Settings& settings) {
  c10::impl::GenericList list(operand.item_type);
  list.reserve(operand.items.size());
  const auto kind = operand.item_type->kind();
  for (const auto& item : operand.items) {
    auto value = value_of(item, values, settings);
    TORCH_CHECK((kind != c10::TypeKind::IntType || value.isInt()) &&
                    (kind != c10::TypeKind::BoolType || value.isBool()) &&
                    (kind != c10::TypeKind::FloatType || value.isDouble()) &&
                    (kind != c10::TypeKind::NumberType || value.isScalar()),
                "a list of ", operand.item_type->str(), " has a ", value.tagKind());
    list.push_back(std::move(value));
  }
  return list;
}

/// torch.batch_norm() over the ranks. `stack` has its arguments.
at::Tensor normalise(const gradients::SynchronisedOperator& over_ranks, const std::vector<c10::IValue>& stack) {
  const auto tensor = [&](std::size_t i) { return stack[i].isNone() ? at::Tensor() : stack[i].toTensor(); };
  return over_ranks(tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), stack[6].toDouble(), stack[7].toDouble());
}

void call(const Node& node, std::vector<c10::IValue>& stack, const Settings& settings) {
  const auto number = static_cast<std::size_t>(node.mode.batch_norm);
  if (node.arithmetic) {
    stack.assign(1, node.arithmetic(stack));
  } else if (node.mode.batch_norm >= 0 && number < settings.batch_norms.size() && settings.in_training &&
             settings.batch_norms[number]->is_connected() && stack[5].toBool()) {
    stack.assign(1, normalise(*settings.batch_norms[number], stack));
  } else {
    if (node.check != nullptr) node.check(stack);
    node.op->callBoxed(stack);
  }
}

void run_node(const Node& node, std::vector<c10::IValue>& values, std::vector<c10::IValue>& stack,
              const Settings& settings) {
  stack.clear();
  for (const auto& operand : node.operands) stack.push_back(value_of(operand, values, settings));
  if (!settings.in_training && (node.mode.argument >= 0 || node.mode.counts_batches)) {
    if (node.mode.counts_batches) {
      if (node.outputs[0] != no_slot) values[node.outputs[0]] = std::move(stack[0]);
      return;
    }
    stack[static_cast<std::size_t>(node.mode.argument)] = node.mode.in_evaluation;
  }
  call(node, stack, settings);
  if (node.returns_list) {
    const auto items = stack.at(0).toListRef();
    TORCH_CHECK(items.size() == node.outputs.size(), "it gives ", items.size(), " values, and ", node.outputs.size(),
                " when the model was exported");
    for (std::size_t i = 0; i < items.size(); ++i)
      if (node.outputs[i] != no_slot) values[node.outputs[i]] = items[i];
    return;
  }
  for (std::size_t i = 0; i < node.outputs.size(); ++i)
    if (node.outputs[i] != no_slot) values[node.outputs[i]] = std::move(stack.at(i));
}

}  // namespace

c10::IValue value_of(const Operand& operand, std::vector<c10::IValue>& values, const Settings& settings) {
  switch (operand.kind) {
    case Kind::constant:
      return operand.constant;
    case Kind::device:
      return settings.device ? c10::IValue(*settings.device) : operand.constant;
    case Kind::value:
      return take(operand, values);
    case Kind::list:
      return list_of(operand, values, settings);
    case Kind::number_as_float: {
      auto value = take(operand, values);
      return value.isInt() ? c10::IValue(static_cast<double>(value.toInt())) : value;
    }
    case Kind::number_as_tensor: {
      auto value = take(operand, values);
      return value.isTensor() ? value : number_as_tensor(value);
    }
  }
  return {};
}

void run(const Program& program, std::size_t begin, std::size_t end, std::vector<c10::IValue>& values,
         const Settings& settings) {
  OpenScopes scopes(program, settings);
  std::vector<c10::IValue> stack;
  stack.reserve(16);
  for (auto i = begin; i < end; ++i) {
    const auto& node = program.nodes[i];
    if (node.scope != scopes.current()) scopes.move_to(node.scope);
    try {
      run_node(node, values, stack, settings);
    } catch (c10::Error& error) {
      error.add_context("in " + node.name + (node.module.empty() ? "" : " of " + node.module) +
                        (node.source.empty() ? "" : ", " + node.source));
      throw;
    }
  }
}

}  // namespace muster::detail::weights::exported
