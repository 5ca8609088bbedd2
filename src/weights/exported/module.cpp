// Makes a module of an exported program: names its tensors as Python does, checks its inputs, and switches its mode.
#include "base/text.hpp"
#include "muster/error.hpp"
#include "muster/exported.hpp"
#include "muster/sync_batch_norm.hpp"
#include "weights/exported/interpreter.hpp"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace muster {

using namespace detail::weights::exported;
using detail::gradients::SynchronisedOperator;

struct ExportedModuleImpl::Program : detail::weights::exported::Program {};

struct ExportedModuleImpl::State {
  std::shared_ptr<const Program> program;
  std::vector<at::Tensor> tensors = {};  ///< in the order of Program::tensors
  std::vector<std::string> input_names = {};
  Settings settings = {};
  bool exported_in_training = true;
};

namespace {

constexpr const char* calling = "running an exported program";

[[noreturn]] void refuse_input(const std::string& fact, const std::string& remedy) {
  throw Error(ExitCode::usage, calling, fact, remedy);
}

/// True unless the program was exported in evaluation. The operators of torch's own modules tell. An operator that a
/// model calls itself, such as F.dropout(x, 0.5), may have a mode of its own, and counts only if there are no others.
bool was_in_training(const Program& program) {
  int on[2] = {}, all[2] = {};  // numbers of operators; [1]: operators of torch's own modules, [0]: the others
  for (const auto& node : program.nodes) {
    if (node.mode.argument < 0) continue;
    const auto& mode = node.operands[static_cast<std::size_t>(node.mode.argument)];
    if (mode.kind != Operand::Kind::constant) continue;
    const bool of_module = node.module_class.starts_with("torch.nn.modules.");
    ++all[of_module];
    on[of_module] += mode.constant.isDouble() ? mode.constant.toDouble() > 0 : mode.constant.toBool();
  }
  const bool of_module = all[true] > 0;
  return all[of_module] == 0 || on[of_module] > 0;
}

/// Appends the leaves of `value` to `leaves`, in order. Refuses a value that does not have the form of the tree.
void flatten(const Tree& tree, const c10::IValue& value, const std::string& name, std::vector<c10::IValue>& leaves) {
  const auto fail = [&](const std::string& what) {
    refuse_input("the input " + name + " is not the " + what + " that was exported, but a " + value.tagKind(),
                 "Give the inputs of Python's forward(), as exported");
  };
  switch (tree.kind) {
    case Tree::Kind::leaf:
      return leaves.push_back(value);
    case Tree::Kind::dict: {
      if (!value.isGenericDict() || value.toGenericDict().size() != tree.children.size()) fail("dict");
      const auto dict = value.toGenericDict();
      for (std::size_t i = 0; i < tree.children.size(); ++i) {
        const auto at = dict.find(tree.keys[i]);
        if (at == dict.end()) fail("dict");
        flatten(tree.children[i], at->value(), name, leaves);
      }
      return;
    }
    default: {
      const bool is_list = value.isList();
      if (!is_list && !value.isTuple()) fail(tree.kind == Tree::Kind::list ? "list" : "tuple");
      const std::vector<c10::IValue> items = is_list ? value.toListRef().vec() : value.toTupleRef().elements().vec();
      if (items.size() != tree.children.size()) fail("number of values");
      for (std::size_t i = 0; i < items.size(); ++i) flatten(tree.children[i], items[i], name, leaves);
    }
  }
}

/// Returns the leaves of all inputs, in the order of the program's inputs. The caller may leave out an input whose
/// leaves are all constants; the program's own constants are taken then.
std::vector<c10::IValue> leaves_of(const Program& program, const std::vector<c10::IValue>& inputs,
                                   const std::map<std::string, c10::IValue>& named) {
  std::vector<c10::IValue> leaves;
  std::size_t position = 0, taken = 0;
  const auto take = [&](const Tree& tree, const std::string& name) {
    const auto by_name = named.find(name);
    taken += by_name != named.end();
    if (position < inputs.size()) {
      if (by_name != named.end()) refuse_input("it has two values for the input " + name, "Give each input once");
      flatten(tree, inputs[position], name, leaves);
    } else if (by_name != named.end()) {
      flatten(tree, by_name->second, name, leaves);
    } else {
      for (std::size_t i = 0, count = tree.leaf_count(); i < count; ++i) {
        const auto& input = program.inputs[leaves.size()];
        if (!input.is_constant) refuse_input("the input " + name + " is missing", "Give all inputs of the model");
        leaves.push_back(input.constant);
      }
    }
    ++position;
  };
  const auto &positional = program.in_tree.children[0], &keywords = program.in_tree.children[1];
  for (std::size_t i = 0; i < positional.children.size(); ++i)
    take(positional.children[i], i < program.arguments.size() ? program.arguments[i] : detail::str("number ", i));
  for (std::size_t i = 0; i < keywords.children.size(); ++i)
    take(keywords.children[i], keywords.keys[i].isString() ? keywords.keys[i].toStringRef() : "");
  if (inputs.size() > position || taken != named.size())
    refuse_input(detail::str("it got ", inputs.size() + named.size(), " inputs, and the model takes others"),
                 "Give the inputs of Python's forward(), as exported");
  return leaves;
}

using Symbols = std::map<std::string_view, std::pair<std::int64_t, std::string>>;

void check_size(const Program& program, const Size& size, std::int64_t actual, const std::string& where,
                Symbols& symbols) {
  const auto fail = [&](const std::string& expected) {
    refuse_input(detail::str(where, " is ", actual, ", and the program was exported for ", expected),
                 "Give another shape, or export the model with dynamic_shapes");
  };
  if (size.constant && actual != *size.constant) fail(std::to_string(*size.constant));
  if (!size.symbol) return;
  const auto [at, is_new] = symbols.try_emplace(*size.symbol, actual, where);
  if (!is_new && at->second.first != actual) fail(detail::str("that of ", at->second.second, ", ", at->second.first));
  const auto range = program.ranges.find(*size.symbol);
  if (range == program.ranges.end()) return;
  if (actual < range->second.min) fail(detail::str("at least ", range->second.min));
  if (actual > range->second.max) fail(detail::str("at most ", range->second.max));
}

/// True if an input of type `actual` is accepted. Module::to() may have changed floating-point and complex types; all
/// others must be those of the export.
bool is_accepted(at::ScalarType actual, at::ScalarType exported) {
  return actual == exported || (at::isFloatingType(actual) && at::isFloatingType(exported)) ||
         (at::isComplexType(actual) && at::isComplexType(exported));
}

void check_input(const Program& program, const Input& input, const c10::IValue& value, Symbols& symbols) {
  if (input.is_constant) {
    const bool is_equal = value.isNone() == input.constant.isNone() &&
                          (value.isNone() || (value.isScalar() && input.constant.isScalar()
                                                  ? value.toScalar().equal(input.constant.toScalar().toDouble())
                                                  : value == input.constant));
    if (!is_equal)
      refuse_input("the input " + input.name + " is " + c10::str(value) + ", and the program was exported with " +
                       c10::str(input.constant),
                   "Export the model with that value, or make it a tensor");
    return;
  }
  if (!input.dtype) {
    if (!value.isInt()) refuse_input("the input " + input.name + " is no integer", "Give an integer");
    return check_size(program, input.sizes[0], value.toInt(), "the input " + input.name, symbols);
  }
  if (!value.isTensor() || !value.toTensor().defined())
    refuse_input("the input " + input.name + " is a " + value.tagKind() + " and no tensor", "Give a tensor");
  const auto& tensor = value.toTensor();
  if (!is_accepted(tensor.scalar_type(), *input.dtype))
    refuse_input("the input " + input.name + " is of type " + c10::toString(tensor.scalar_type()) +
                     ", and the program was exported for " + c10::toString(*input.dtype),
                 "Convert it");
  if (tensor.dim() != static_cast<std::int64_t>(input.sizes.size()))
    refuse_input(detail::str("the input ", input.name, " has ", tensor.dim(),
                             " dimensions, and the program was exported for ", input.sizes.size()),
                 "Give it the shape that it has in Python");
  for (std::size_t d = 0; d < input.sizes.size(); ++d)
    check_size(program, input.sizes[d], tensor.size(static_cast<std::int64_t>(d)),
               detail::str("dimension ", d, " of the input ", input.name), symbols);
}

/// Builds a value of the tree's form from the leaves that begin at `next`.
c10::IValue build(const Tree& tree, std::vector<c10::IValue>::iterator& next) {
  if (tree.kind == Tree::Kind::leaf) return std::move(*next++);
  std::vector<c10::IValue> items;
  for (const auto& child : tree.children) items.push_back(build(child, next));
  if (tree.kind == Tree::Kind::tuple) return c10::ivalue::Tuple::create(std::move(items));
  const bool all_tensors = std::ranges::all_of(items, [](const auto& item) { return item.isTensor(); });
  const c10::TypePtr type = all_tensors && !items.empty() ? c10::TypePtr(c10::TensorType::get()) : c10::AnyType::get();
  if (tree.kind == Tree::Kind::list) {
    c10::impl::GenericList list(type);
    for (auto& item : items) list.push_back(std::move(item));
    return list;
  }
  const bool has_numbers = !tree.keys.empty() && tree.keys[0].isInt();
  c10::impl::GenericDict dict(has_numbers ? c10::TypePtr(c10::IntType::get()) : c10::StringType::get(), type);
  for (std::size_t i = 0; i < items.size(); ++i) dict.insert(tree.keys[i], std::move(items[i]));
  return dict;
}

}  // namespace

ExportedModuleImpl::ExportedModuleImpl(std::shared_ptr<const Program> program)
    : torch::nn::Module("ExportedModule"), state_(new State{std::move(program)}) {
  auto& state = *state_;
  state.exported_in_training = was_in_training(*state.program);
  for (const auto& tensor : state.program->tensors) {
    state.tensors.push_back(tensor.value);
    if (!tensor.in_state) continue;
    torch::nn::Module* owner = this;
    std::string_view rest = tensor.name;
    for (auto dot = rest.find('.'); dot != rest.npos; dot = rest.find('.')) {
      const std::string name(rest.substr(0, dot));
      rest.remove_prefix(dot + 1);
      const auto children = owner->named_children();
      owner = children.contains(name) ? children[name].get()
                                      : owner->register_module(name, std::make_shared<torch::nn::Module>(name)).get();
    }
    if (tensor.is_parameter)
      owner->register_parameter(std::string(rest), tensor.value, tensor.value.requires_grad());
    else
      owner->register_buffer(std::string(rest), tensor.value);
  }
  for (const auto& input : state.program->inputs)
    if (!input.is_constant) state.input_names.push_back(input.name);
  torch::nn::Module::train(state.exported_in_training);
}

ExportedModuleImpl::~ExportedModuleImpl() = default;

at::Tensor ExportedModuleImpl::forward(const at::Tensor& input) {
  auto output = call({input});
  if (!output.isTensor())
    throw Error(ExitCode::usage, calling, "it gives a " + output.tagKind(),
                "Run it with call(), which gives any value");
  return std::move(output).toTensor();
}

c10::IValue ExportedModuleImpl::call(std::vector<c10::IValue> inputs, std::map<std::string, c10::IValue> named) {
  auto& state = *state_;
  const auto& program = *state.program;
  state.settings.in_training = is_training() || !state.exported_in_training;
  std::vector<c10::IValue> values(program.slot_count);
  for (std::size_t i = 0; i < program.tensors.size(); ++i)
    if (program.tensors[i].slot != no_slot) values[program.tensors[i].slot] = state.tensors[i];
  auto leaves = leaves_of(program, inputs, named);
  inputs.clear();
  named.clear();
  Symbols symbols;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto& input = program.inputs[i];
    check_input(program, input, leaves[i], symbols);
    if (input.slot != no_slot) values[input.slot] = std::move(leaves[i]);
  }
  std::vector<c10::IValue> changed;
  for (const auto& mutation : program.mutations) changed.push_back(values[mutation.target]);
  run(program, 0, program.nodes.size(), values, state.settings);
  leaves.clear();
  for (const auto& output : program.outputs) leaves.push_back(value_of(output, values, state.settings));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < changed.size(); ++i)
    changed[i].toTensor().copy_(value_of(program.mutations[i].value, values, state.settings).toTensor());
  auto next = leaves.begin();
  return build(program.out_tree, next);
}

const std::vector<std::string>& ExportedModuleImpl::input_names() const noexcept { return state_->input_names; }

void ExportedModuleImpl::train(bool on) {
  const auto& state = *state_;
  constexpr const char* doing = "setting the mode of an exported program";
  if (on && !state.exported_in_training)
    throw Error(ExitCode::usage, doing,
                "it was exported in evaluation mode, and has nothing of what only training does",
                "Export model.train()");
  if (!on && state.exported_in_training)
    for (const auto& node : state.program->nodes) {
      const bool is_fixed =
          node.name.starts_with("aten._batch_norm_with_update") || (node.mode.random && !state.program->keep_random);
      if (!is_fixed) continue;
      throw Error(ExitCode::usage, doing,
                  node.name + (node.source.empty() ? "" : " in " + node.source) +
                      " may be for training only, and evaluation cannot leave it out",
                  node.mode.random ? "If it is for evaluation too, load the program with {.keep_random = true}"
                                   : "Export the model without run_decompositions()");
    }
  torch::nn::Module::train(on);
}

void ExportedModuleImpl::to(at::Device device, torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(device, dtype, non_blocking);
  move_others(device, dtype);
}
void ExportedModuleImpl::to(torch::Dtype dtype, bool non_blocking) {
  torch::nn::Module::to(dtype, non_blocking);
  move_others({}, dtype);
}
void ExportedModuleImpl::to(at::Device device, bool non_blocking) {
  torch::nn::Module::to(device, non_blocking);
  move_others(device, {});
}

/// Moves the tensors that are not the module's. Constants keep their type, as in Python.
void ExportedModuleImpl::move_others(std::optional<at::Device> device, std::optional<torch::Dtype> dtype) {
  auto& state = *state_;
  if (device) state.settings.device = device;
  for (std::size_t i = 0; i < state.tensors.size(); ++i) {
    const auto& tensor = state.program->tensors[i];
    if (tensor.in_state) continue;
    auto& value = state.tensors[i];
    value = value.to(device.value_or(value.device()), tensor.is_constant || !value.is_floating_point()
                                                          ? value.scalar_type()
                                                          : dtype.value_or(value.scalar_type()));
  }
}

std::vector<SynchronisedOperator*> ExportedModuleImpl::synchronised_operators() {
  std::vector<SynchronisedOperator*> all;
  for (const auto& norm : state_->settings.batch_norms) all.push_back(norm.get());
  return all;
}

void ExportedModuleImpl::require_synchronisable() const {
  for (const auto& node : state_->program->nodes)
    if (node.mode.batch_norm < 0 && node.name.find("batch_norm") != std::string::npos)
      throw Error(ExitCode::usage, "exchanging batch-norms for synchronised ones",
                  "the exported program has " + node.name + ", which cannot be synchronised",
                  "Export the model without run_decompositions()");
}

void ExportedModuleImpl::synchronise_batch_norms() {
  const auto count =
      std::ranges::count_if(state_->program->nodes, [](const auto& node) { return node.mode.batch_norm >= 0; });
  auto& norms = state_->settings.batch_norms;
  while (std::ssize(norms) < count) norms.push_back(std::make_shared<SynchronisedOperator>());
}

ExportedModule load_exported(const std::filesystem::path& file, const ExportedOptions& options) {
  auto program = std::make_shared<ExportedModuleImpl::Program>();
  static_cast<detail::weights::exported::Program&>(*program) = read_program(file, options.namespaces);
  program->keep_random = options.keep_random;
  try {
    return ExportedModule(std::make_shared<ExportedModuleImpl>(std::move(program)));
  } catch (const c10::Error& error) {  // a tensor has a name that a module cannot have
    throw Error(ExitCode::data, "reading " + file.string(), error.what_without_backtrace(), "Use another file");
  }
}

}  // namespace muster
