// Reads the graph of a program. Numbers from the file are checked before they index or size anything here.
#include "weights/exported/program.hpp"

#include "base/text.hpp"

#include <ATen/ScalarOps.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace muster::detail::weights::exported {
namespace {

/// The slots of the values of one graph, by name.
using Names = std::map<std::string, Slot>;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; end != text.npos; text.remove_prefix(end == text.npos ? text.size() : end + 1))
    parts.push_back(text.substr(0, end = text.find(separator)));
  return parts;
}

/// Returns the model's own line in a Python stack trace: the last one outside of torch, or the first if there is none.
std::string source_of(std::string_view trace) {
  const auto lines = split(trace, '\n');
  std::string found;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto begin = lines[i].find("File \""), end = lines[i].find("\", line ");
    if (begin == std::string_view::npos || end == std::string_view::npos || end < begin + 6) continue;
    const auto path = lines[i].substr(begin + 6, end - begin - 6), number = split(lines[i].substr(end + 8), ',')[0];
    const bool is_own =
        path.find("site-packages/torch/") == path.npos && !path.starts_with("torch/") && !path.starts_with('<');
    if (!is_own && !found.empty()) continue;
    found = str(path.substr(path.rfind('/') + 1), ":", number);
    if (i + 1 < lines.size() && lines[i + 1].find_first_not_of(' ') != std::string_view::npos)
      found += str(" (", lines[i + 1].substr(lines[i + 1].find_first_not_of(' ')), ")");
  }
  return found;
}

/// Some types of arguments are enumerations, whose numbers operators do not check. Returns the form in which a file
/// must give such an argument; empty for other types.
std::string_view enumeration_form(const c10::Type& type) {
  static const std::map<std::string_view, std::string_view> forms{{"ScalarType", "as_scalar_type"},
                                                                  {"Layout", "as_layout"},
                                                                  {"MemoryFormat", "as_memory_format"},
                                                                  {"QScheme", "as_none"}};
  const auto name = type.str();
  const auto at = forms.find(std::string_view(name).substr(0, name.find('?')));
  return at == forms.end() ? std::string_view() : at->second;
}

class Reader {
 public:
  Reader(const std::filesystem::path& file, const std::vector<std::string>& namespaces)
      : file_(file), namespaces_(namespaces) {}

  Program read() {
    try {
      const auto& json = file_.program();
      file_.check_fields(json, {"graph_module", "opset_version", "range_constraints", "schema_version", "verifiers",
                                "torch_version", "guards_code"});
      constants_ = file_.read_tensors("constants");
      weights_ = file_.read_tensors("weights");
      for (const auto& [symbol, range] : json.at("range_constraints").items()) {
        auto& limits = program_.ranges[symbol];
        if (const auto min = range.value("min_val", Json()); !min.is_null()) limits.min = file_.integer_at(min);
        if (const auto max = range.value("max_val", Json()); !max.is_null()) limits.max = file_.integer_at(max);
      }
      read_module(json.at("graph_module"));
    } catch (const Json::exception& error) {
      file_.refuse_damaged(error.what());
    } catch (const c10::Error& error) {
      file_.refuse_damaged(error.what_without_backtrace());
    }
    return std::move(program_);
  }

 private:
  /// Returns the only entry of an object.
  std::pair<std::string, const Json&> variant(const Json& object) const {
    if (!object.is_object() || object.size() != 1) file_.refuse_damaged("a value in it has several types, or none");
    return {object.begin().key(), object.begin().value()};
  }

  static c10::Device device_at(const Json& device) {
    const auto& index = device.at("index");
    const c10::Device type(device.at("type").get<std::string>());
    return index.is_null() ? type : c10::Device(type.type(), static_cast<c10::DeviceIndex>(index.get<std::int8_t>()));
  }

  static double real_at(const Json& number) {
    if (number == "Infinity") return std::numeric_limits<double>::infinity();
    if (number == "-Infinity") return -std::numeric_limits<double>::infinity();
    if (number == "NaN") return std::numeric_limits<double>::quiet_NaN();
    return number.get<double>();
  }

  void read_module(const Json& module) {
    file_.check_fields(module, {"graph", "signature", "module_call_graph", "metadata", "treespec_namedtuple_fields"});
    const auto &graph = module.at("graph"), &signature = module.at("signature");
    file_.check_fields(signature, {"input_specs", "output_specs"});
    const auto& call = module.at("module_call_graph").at(0).at("signature");
    program_.in_tree = read_tree(call.at("in_spec"));
    program_.out_tree = read_tree(call.at("out_spec"));
    if (const auto at = call.find("forward_arg_names"); at != call.end() && !at->is_null())
      program_.arguments = at->get<std::vector<std::string>>();

    Names names;
    const auto &inputs = graph.at("inputs"), &specs = signature.at("input_specs");
    if (inputs.size() != specs.size()) file_.refuse_damaged("its inputs are not those it lists");
    for (std::size_t i = 0; i < specs.size(); ++i) read_input(inputs[i], specs[i], graph, names);
    const auto outputs = read_graph(graph, 0, names);

    const auto& output_specs = signature.at("output_specs");
    if (outputs.size() != output_specs.size()) file_.refuse_damaged("its outputs are not those it lists");
    for (std::size_t i = 0; i < outputs.size(); ++i) read_output(outputs[i], output_specs[i], names);
    if (program_.in_tree.leaf_count() != program_.inputs.size()) file_.refuse_damaged("its inputs do not fit its tree");
    if (program_.out_tree.leaf_count() != program_.outputs.size())
      file_.refuse_damaged("its outputs do not fit its tree");
    if (const auto& in = program_.in_tree;
        in.children.size() != 2 || in.children[0].kind != Tree::Kind::tuple || in.children[1].kind != Tree::Kind::dict)
      file_.refuse_damaged("its inputs are not arguments of a call");
    for (const auto& [name, stored] : weights_)
      if (!tensor_slots_.contains(name))
        program_.tensors.push_back({.name = name, .is_parameter = stored.is_parameter, .value = stored.value});
    program_.slot_count = next_;
    mark_last_uses();
  }

  Tree read_tree(const std::string& text) const {
    const auto json = file_.parse(text, "a signature");
    if (json.at(0) != 1) file_.refuse("its signature has another version");
    return read_tree_node(json.at(1));
  }

  Tree read_tree_node(const Json& json) const {
    using Kind = Tree::Kind;
    static const std::map<std::string, Kind> kinds{{"builtins.tuple", Kind::tuple},
                                                   {"collections.namedtuple", Kind::tuple},
                                                   {"builtins.list", Kind::list},
                                                   {"builtins.dict", Kind::dict},
                                                   {"collections.OrderedDict", Kind::dict}};
    file_.check_fields(json, {"type", "context", "children_spec"});
    Tree tree;
    if (json.at("type").is_null()) return tree;
    const auto type = json.at("type").get<std::string>();
    const auto kind = kinds.find(type);
    if (kind == kinds.end()) file_.refuse_object("the class " + type + " among its inputs or outputs");
    tree.kind = kind->second;
    for (const auto& child : json.at("children_spec")) tree.children.push_back(read_tree_node(child));
    if (tree.kind != Kind::dict) return tree;
    for (const auto& key : file_.parse(json.at("context").get<std::string>(), "a signature"))
      tree.keys.push_back(key.is_number() ? c10::IValue(file_.integer_at(key)) : c10::IValue(key.get<std::string>()));
    if (tree.keys.size() != tree.children.size()) file_.refuse("its signature has a dict without its keys");
    return tree;
  }

  Slot define(const std::string& name, Names& names) {
    if (!names.try_emplace(name, next_).second) file_.refuse_damaged("two values are called " + name);
    return next_++;
  }

  void read_input(const Json& input, const Json& spec, const Json& graph, Names& names) {
    const auto [kind, value] = variant(spec);
    const auto [form, content] = variant(input);
    const auto tensor = [&](const char* field, bool is_parameter, bool in_state) {
      const std::string name = value.at(field);
      auto at = weights_.find(name);
      if (at == weights_.end() && (at = constants_.find(name)) == constants_.end())
        file_.refuse("there is no " + name + " in it");
      const auto slot = define(content.at("name"), names);
      tensor_slots_[name] = slot;
      program_.tensors.push_back({name, is_parameter, kind == "tensor_constant", in_state, slot, at->second.value});
    };
    if (kind == "parameter") return tensor("parameter_name", true, true);
    if (kind == "buffer") return tensor("buffer_name", false, value.at("persistent").get<bool>());
    if (kind == "tensor_constant") return tensor("tensor_constant_name", false, false);
    Input result{.name = "a constant"};
    if (kind == "user_input" && form == "as_tensor") {
      result.name = content.at("name");
      const auto& meta = graph.at("tensor_values").at(result.name);
      result.dtype = file_.tensor_type(meta);
      for (const auto& size : meta.at("sizes")) result.sizes.push_back(read_size(size));
    } else if (kind == "user_input" && form == "as_sym_int") {
      result.name = content.at("as_name");
      result.sizes.push_back(read_size(graph.at("sym_int_values").at(result.name)));
    } else if (kind == "constant_input" || (kind == "user_input" && !form.starts_with("as_sym_"))) {
      result.is_constant = true;
      if (kind == "constant_input") result.name = value.at("name");
      result.constant = read_constant(kind == "constant_input" ? value.at("value") : input);
    } else {
      file_.refuse_object("an input of the kind " + (kind == "user_input" ? form : kind));
    }
    if (!result.is_constant) result.slot = define(result.name, names);
    program_.inputs.push_back(std::move(result));
  }

  Size read_size(const Json& json) const {
    const auto [form, value] = variant(json);
    if (form == "as_int") return {.constant = file_.integer_at(value)};
    const auto text = value.at("expr_str").get<std::string>();
    constexpr std::string_view begin = "Symbol('";
    const auto end = text.find('\'', begin.size());
    if (text.starts_with(begin) && end != text.npos && text.find(')') == text.size() - 1)
      return {.symbol = text.substr(begin.size(), end - begin.size())};
    return {};
  }

  c10::IValue read_constant(const Json& json) const {
    auto operand = read_operand(json, {});
    if (operand.kind != Operand::Kind::constant) file_.refuse_object("a constant of the kind " + variant(json).first);
    return std::move(operand.constant);
  }

  void read_output(const Operand& output, const Json& spec, const Names& names) {
    const auto [kind, value] = variant(spec);
    if (output.kind != Operand::Kind::constant && output.kind != Operand::Kind::value)
      file_.refuse_damaged("an output is no value");
    if (kind == "user_output") return program_.outputs.push_back(output);
    Slot target = no_slot;
    if (kind == "user_input_mutation") {
      target = find(value.at("user_input_name"), names);
    } else if (kind == "buffer_mutation" || kind == "parameter_mutation") {
      const std::string name = value.at(kind == "buffer_mutation" ? "buffer_name" : "parameter_name");
      if (!tensor_slots_.contains(name)) file_.refuse_damaged("it changes a tensor that is not there");
      target = tensor_slots_.at(name);
    } else {
      file_.refuse_object("an output of the kind " + kind);
    }
    program_.mutations.push_back({output, target});
  }

  Slot find(const std::string& name, const Names& names) const {
    const auto at = names.find(name);
    if (at == names.end()) file_.refuse_damaged("it uses " + name + " before it is computed");
    return at->second;
  }

  /// Adds the nodes of a graph to the program. Returns its outputs.
  std::vector<Operand> read_graph(const Json& graph, std::uint32_t scope, Names& names) {
    file_.check_fields(graph, {"inputs", "outputs", "nodes", "tensor_values", "sym_int_values", "sym_bool_values",
                               "is_single_tensor_return", "custom_obj_values", "sym_float_values"});
    for (const auto& node : graph.at("nodes")) read_node(node, scope, names);
    std::vector<Operand> outputs;
    for (const auto& output : graph.at("outputs")) outputs.push_back(read_operand(output, names));
    return outputs;
  }

  void read_node(const Json& json, std::uint32_t scope, Names& names) {
    file_.check_fields(json, {"target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name"});
    const auto target = json.at("target").get<std::string>();
    const auto& metadata = json.at("metadata");
    Node node{.name = target, .scope = scope};
    node.source = source_of(metadata.value("stack_trace", ""));
    if (const auto stack = metadata.value("nn_module_stack", ""); !stack.empty())
      if (const auto parts = split(split(stack, ';').back(), ','); parts.size() == 3 && parts[0] != parts[1]) {
        node.module = parts[1];
        node.module_class = parts[2];
      }
    constexpr std::string_view operators = "torch.ops.", subgraphs = "torch.ops.higher_order.";
    if (target.starts_with(subgraphs)) return read_subgraph(json, node, names);
    if (target.starts_with(operators)) {
      node.name = target.substr(operators.size());
      read_operator(json, node, names);
    } else {
      node.arithmetic = find_arithmetic(target, json.at("inputs").size());
      if (!node.arithmetic) refuse_node(node, "which muster does not have");
      for (const auto& input : json.at("inputs")) node.operands.push_back(read_operand(input.at("arg"), names));
      if (std::ranges::any_of(node.operands, [](const Operand& operand) {
            return operand.kind != Operand::Kind::value && operand.kind != Operand::Kind::constant;
          }))
        refuse_node(node, "whose operands are no numbers");
    }
    for (const auto& name : names_of_outputs(json))
      node.outputs.push_back(name.empty() ? no_slot : define(name, names));
    node.returns_list = json.at("outputs").size() == 1 && json.at("outputs").at(0).contains("as_tensors");
    const auto returns = node.op ? node.op->schema().returns().size() : 1;
    if (!node.returns_list && node.outputs.size() > returns)
      file_.refuse_damaged(node.name + " does not give so many values");
    if (node.op && node.returns_list && returns != 1) refuse_node(node, "whose outputs muster does not know");
    program_.nodes.push_back(std::move(node));
  }

  [[noreturn]] void refuse_node(const Node& node, const std::string& fact,
                                const std::string& remedy = "Export a model that does without it") const {
    file_.refuse("the program uses " + node.name + (node.source.empty() ? "" : " in " + node.source) + ", " + fact,
                 remedy);
  }

  /// A `with` block: its nodes become nodes of the program, in a scope.
  void read_subgraph(const Json& json, const Node& node, Names& names) {
    const auto& inputs = json.at("inputs");
    Scope scope{.parent = node.scope};
    std::size_t graph_at = 0;
    const auto argument = [&](std::size_t i) { return read_constant(inputs.at(i).at("arg")); };
    if (node.name.ends_with(".wrap_with_set_grad_enabled")) {
      scope.enabled = argument(0).toBool();
      graph_at = 1;
    } else if (node.name.ends_with(".wrap_with_autocast")) {
      scope.device = c10::Device(argument(0).toStringRef()).type();
      if (const auto [form, type] = variant(inputs.at(1).at("arg")); form != "as_none")
        scope.dtype = file_.type_at(type);
      scope.enabled = argument(2).toBool();
      if (const auto cache = argument(3); !cache.isNone()) scope.cache = cache.toBool();
      graph_at = 4;
    } else {
      refuse_node(node, "which muster does not run", "Write the model without control flow that depends on data");
    }
    const auto [form, value] = variant(inputs.at(graph_at).at("arg"));
    if (form != "as_graph") file_.refuse_damaged(node.name + " has no graph");
    const auto& graph = value.at("graph");
    Names inner;
    const auto& parameters = graph.at("inputs");
    if (parameters.size() + graph_at + 1 != inputs.size())
      file_.refuse_damaged(node.name + " has other inputs than its graph");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto outer = read_operand(inputs.at(graph_at + 1 + i).at("arg"), names);
      if (outer.kind != Operand::Kind::value) continue;
      if (!inner.try_emplace(name_of(parameters.at(i)), outer.slot).second)
        file_.refuse_damaged(node.name + " has two inputs of one name");
    }
    program_.scopes.push_back(scope);
    const auto outputs = read_graph(graph, static_cast<std::uint32_t>(program_.scopes.size() - 1), inner);
    const auto results = names_of_outputs(json);
    if (results.size() > outputs.size()) file_.refuse_damaged(node.name + " has other outputs");
    for (std::size_t i = 0; i < results.size(); ++i)
      if (!results[i].empty() && outputs[i].kind == Operand::Kind::value &&
          !names.try_emplace(results[i], outputs[i].slot).second)
        file_.refuse_damaged("two values are called " + results[i]);
  }

  std::string name_of(const Json& argument) const {
    const auto [form, value] = variant(argument);
    return value.at(form.starts_with("as_sym_") ? "as_name" : "name");
  }

  /// The names of a node's outputs; empty for outputs that nothing uses.
  std::vector<std::string> names_of_outputs(const Json& node) const {
    std::vector<std::string> names;
    for (const auto& output : node.at("outputs")) {
      const auto [form, value] = variant(output);
      if (form == "as_tensors")
        for (const auto& item : value) names.push_back(item.at("name"));
      else
        names.push_back(form == "as_none" ? std::string() : name_of(output));
    }
    return names;
  }

  void read_operator(const Json& json, Node& node, const Names& names) {
    const auto parts = split(node.name, '.');
    if (parts.size() != 3) refuse_node(node, "which is no operator");
    const std::string space(parts[0]), name = str(space, "::", parts[1]),
                                       overload(parts[2] == "default" ? "" : parts[2]);
    const bool of_torch = space == "aten";
    if (!of_torch && std::ranges::find(namespaces_, space) == namespaces_.end())
      refuse_node(node, "an operator of another library",
                  "If it is harmless, allow it: load_exported(file, {.namespaces = {\"" + space + "\"}})");
    node.op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!node.op)
      refuse_node(node, "which this libtorch does not have",
                  of_torch ? "Export the model with the version of torch used here" : "Load the library that has it");
    const auto& schema = node.op->schema();
    if (of_torch && !is_allowed(schema)) refuse_node(node, "which files may not use");
    node.check = find_check(schema);
    std::map<std::string, const Json*> given;
    for (const auto& input : json.at("inputs")) {
      file_.check_fields(input, {"name", "arg", "kind"});
      given[input.at("name").get<std::string>()] = &input.at("arg");
    }
    for (const auto& argument : schema.arguments()) {
      const auto at = given.find(argument.name());
      if (at == given.end()) {
        if (!argument.default_value()) refuse_node(node, "without its argument " + argument.name());
        node.operands.push_back({.constant = *argument.default_value()});
        continue;
      }
      const auto form = variant(*at->second).first;
      if (const auto needed = enumeration_form(*argument.real_type());
          !needed.empty() && form != needed && form != "as_none")
        refuse_argument(node, argument);
      node.operands.push_back(convert(read_operand(*at->second, names), argument.type(), argument.N(), node, argument));
      given.erase(at);
    }
    if (!given.empty()) refuse_node(node, "which has no argument " + given.begin()->first);
    // Export asserts the type and device of each tensor that it converts. Here both follow the model and autocast, so
    // the assertion loses these arguments.
    if (node.name == "aten._assert_tensor_metadata.default")
      for (std::size_t i = 3; i < node.operands.size(); ++i) node.operands[i] = {};
    node.mode = find_mode(node);
  }

  [[noreturn]] void refuse_argument(const Node& node, const c10::Argument& argument) const {
    refuse_node(node, "whose argument " + argument.name() + " is not of its type " + argument.real_type()->str());
  }

  /// Brings an operand into the type that an operator takes, as Python does.
  Operand convert(Operand operand, const c10::TypePtr& type, std::optional<std::int32_t> count, const Node& node,
                  const c10::Argument& argument) const {
    using Kind = Operand::Kind;
    auto& constant = operand.constant;
    const bool is_constant = operand.kind == Kind::constant, is_value = operand.kind == Kind::value;
    const auto require = [&](bool fits) {
      if (!fits) refuse_argument(node, argument);
    };
    switch (type->kind()) {
      case c10::TypeKind::OptionalType:
        if (is_constant && constant.isNone()) return operand;
        return convert(std::move(operand), type->castRaw<c10::OptionalType>()->getElementType(), count, node, argument);
      case c10::TypeKind::TensorType:
        require(is_value || (is_constant && constant.isScalar()));
        if (is_value)
          operand.kind = Kind::number_as_tensor;
        else
          constant = number_as_tensor(constant);
        return operand;
      case c10::TypeKind::FloatType:
        require(is_value || (is_constant && (constant.isInt() || constant.isDouble())));
        if (is_value)
          operand.kind = Kind::number_as_float;
        else if (constant.isInt())
          constant = static_cast<double>(constant.toInt());
        return operand;
      case c10::TypeKind::DeviceObjType:
        require(operand.kind == Kind::device);
        return operand;
      case c10::TypeKind::ListType: {
        if (operand.kind != Kind::list) {  // one number stands for all items
          require(count && *count >= 1 && *count <= 8);
          operand = {.kind = Kind::list, .items = std::vector<Operand>(static_cast<std::size_t>(*count), operand)};
        }
        operand.item_type = type->castRaw<c10::ListType>()->getElementType();
        for (auto& item : operand.items)
          item = convert(std::move(item), operand.item_type, std::nullopt, node, argument);
        if (!std::ranges::all_of(operand.items, [](const auto& item) { return item.kind == Kind::constant; }))
          return operand;
        c10::impl::GenericList list(operand.item_type);
        for (const auto& item : operand.items) list.push_back(item.constant);
        return {.constant = list};
      }
      case c10::TypeKind::IntType:
      case c10::TypeKind::BoolType:
      case c10::TypeKind::NumberType:
        if (is_value) return operand;  // checked when the operator is called
        [[fallthrough]];
      default:
        require(is_constant && (constant.type()->isSubtypeOf(*type) ||
                                (type->kind() == c10::TypeKind::NumberType && constant.isBool())));
        return operand;
    }
  }

  Operand read_operand(const Json& json, const Names& names) const {
    const auto [form, value] = variant(json);
    return read_value(form, value, names);
  }

  Operand read_value(std::string_view form, const Json& value, const Names& names) const {
    using Kind = Operand::Kind;
    if (value.is_array() && form.ends_with('s')) {  // as_ints is a list of as_int
      Operand list{.kind = Kind::list};
      for (const auto& item : value) list.items.push_back(read_value(form.substr(0, form.size() - 1), item, names));
      return list;
    }
    if (form == "as_tensor") return {.kind = Kind::value, .slot = find(value.at("name"), names)};
    if (form == "as_name") return {.kind = Kind::value, .slot = find(value, names)};
    if (form == "as_optional_tensor" || form.starts_with("as_sym_")) return read_operand(value, names);
    if (form == "as_none") return {};
    if (form == "as_int") return {.constant = file_.integer_at(value)};
    if (form == "as_float") return {.constant = real_at(value)};
    if (form == "as_bool") return {.constant = value.get<bool>()};
    if (form == "as_string") return {.constant = value.get<std::string>()};
    if (form == "as_complex")
      return {.constant = c10::complex<double>(real_at(value.at("real")), real_at(value.at("imag")))};
    if (form == "as_device") return {.kind = Kind::device, .constant = device_at(value)};
    if (form == "as_scalar_type") return {.constant = static_cast<std::int64_t>(file_.type_at(value))};
    if (form == "as_memory_format") {
      constexpr std::array formats{at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
                                   at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::Preserve};
      const auto number = file_.integer_at(value);
      if (number < 1 || number > 4) file_.refuse("its program has an unknown memory format");
      return {.constant = static_cast<std::int64_t>(formats[static_cast<std::size_t>(number - 1)])};
    }
    if (form == "as_layout" && value == 7) return {.constant = static_cast<std::int64_t>(at::kStrided)};
    if (form == "as_layout") file_.refuse_object("tensors of a layout that is not strided");
    if (form == "as_custom_obj") file_.refuse_object("the object " + value.at("class_fqn").get<std::string>());
    file_.refuse_object(str("a constant of the kind ", form));
  }

  Mode find_mode(const Node& node) {
    Mode mode;
    const auto& schema = node.op->schema();
    for (const auto* const name : {"train", "training", "use_input_stats", "dropout_p"})
      if (const auto at = schema.argumentIndexWithName(name)) {
        mode.argument = *at;
        mode.in_evaluation = std::string_view(name) == "dropout_p" ? c10::IValue(0.0) : c10::IValue(false);
      }
    // Without running statistics, a norm uses the batch's in evaluation too.
    if (const auto at = schema.argumentIndexWithName("running_mean"))
      if (const auto& mean = node.operands[static_cast<std::size_t>(*at)];
          mean.kind == Operand::Kind::constant && mean.constant.isNone())
        mode = {};
    if (node.name == "aten.batch_norm.default") mode.batch_norm = batch_norms_++;
    if (node.name == "aten.add_.Tensor" || node.name == "aten.add.Tensor")
      mode.counts_batches = std::ranges::any_of(program_.tensors, [&](const auto& tensor) {
        return tensor.slot == node.operands[0].slot && split(tensor.name, '.').back() == "num_batches_tracked";
      });
    // Torch's fractional pooling is random in both modes.
    mode.random = mode.argument < 0 && node.op->hasTag(at::Tag::nondeterministic_seeded) &&
                  !node.module_class.starts_with("torch.nn.modules.pooling.");
    return mode;
  }

  /// Marks the last operand that uses each value, and leaves out outputs that nothing uses.
  void mark_last_uses() {
    std::vector<bool> used(next_);
    const auto use = [&](const auto& self, Operand& operand, bool may_be_last) -> void {
      for (auto item = operand.items.rbegin(); item != operand.items.rend(); ++item) self(self, *item, may_be_last);
      if (operand.slot == no_slot) return;
      operand.last_use = may_be_last && !used[operand.slot];
      used[operand.slot] = true;
    };
    for (auto& output : program_.outputs) use(use, output, false);
    for (auto& mutation : program_.mutations) {
      use(use, mutation.value, false);
      used[mutation.target] = true;
    }
    for (auto node = program_.nodes.rbegin(); node != program_.nodes.rend(); ++node) {
      for (auto& output : node->outputs)
        if (output != no_slot && !used[output]) output = no_slot;
      for (auto operand = node->operands.rbegin(); operand != node->operands.rend(); ++operand)
        use(use, *operand, true);
    }
  }

  ProgramFile file_;
  const std::vector<std::string>& namespaces_;
  Program program_;
  std::map<std::string, StoredTensor> weights_, constants_;  ///< only weights are in Python's state_dict()
  std::map<std::string, Slot> tensor_slots_;
  Slot next_ = 0;
  int batch_norms_ = 0;
};

}  // namespace

std::size_t Tree::leaf_count() const {
  std::size_t count = kind == Kind::leaf;
  for (const auto& child : children) count += child.leaf_count();
  return count;
}

at::Tensor number_as_tensor(const c10::IValue& number) {
  auto tensor = at::scalar_to_tensor(number.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Program read_program(const std::filesystem::path& file, const std::vector<std::string>& namespaces) {
  return Reader(file, namespaces).read();
}

}  // namespace muster::detail::weights::exported
