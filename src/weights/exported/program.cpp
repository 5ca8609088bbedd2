// Reads what torch.export.save() writes. The file's format: torch/_export/serde/schema.py in torch's Python package.
#include "weights/exported/program.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"
#include "weights/archive.hpp"

#include <ATen/ScalarOps.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <set>
#include <span>
#include <string_view>
#include <utility>

namespace muster::detail::weights::exported {
namespace {

constexpr std::int64_t known_major = 8, known_minor = 20;

/// Values by name, in one graph.
using Names = std::map<std::string, Slot>;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; end != text.npos; text.remove_prefix(end == text.npos ? text.size() : end + 1))
    parts.push_back(text.substr(0, end = text.find(separator)));
  return parts;
}

/// Returns the model's own line in a Python stack trace: the last one outside of torch.
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
    found = std::string(path.substr(path.rfind('/') + 1)) + ":" + std::string(number);
    if (i + 1 < lines.size() && lines[i + 1].find_first_not_of(' ') != std::string_view::npos)
      found += " (" + std::string(lines[i + 1].substr(lines[i + 1].find_first_not_of(' '))) + ")";
  }
  return found;
}

[[noreturn]] void refuse_version(const Archive& archive, const std::string& fact, const std::string& version) {
  archive.refuse(fact + ": the file has version " + version + " of the format, and muster knows " +
                     std::to_string(known_major) + "." + std::to_string(known_minor),
                 "Export the model again with a version of torch that muster knows");
}

class Reader {
 public:
  Reader(const std::filesystem::path& file, const std::vector<std::string>& namespaces)
      : archive_(file), namespaces_(namespaces) {
    program_.file = file;
  }

  Program read() {
    archive_.check_stored();
    folder_ = archive_.folder_of("archive_format", "Write it with torch.export.save()");
    if (archive_.text(folder_ + "archive_format", 64) != "pt2") archive_.refuse("it is not of torch.export.save()");
    if (const auto order = folder_ + "byteorder"; archive_.contains(order) && archive_.text(order, 64) != "little")
      archive_.refuse("its byte order is not little-endian", "Make it again on the type of machine used here");
    try {
      const auto model = find_model();
      const auto json = parse(folder_ + "models/" + model + ".json");
      const auto& version = json.at("schema_version");
      version_ = check_version(archive_, version.at("major"), version.at("minor"));
      check_fields(json, {"graph_module", "opset_version", "range_constraints", "schema_version", "verifiers",
                          "torch_version", "guards_code"});
      read_weights("data/constants/" + model + "_constants_config.json", "data/constants/");
      for (const auto& [name, value] : stored_) constants_.insert(name);
      read_weights("data/weights/" + model + "_weights_config.json", "data/weights/");
      for (const auto& [symbol, range] : json.at("range_constraints").items()) {
        auto& limits = program_.ranges[symbol];
        if (range.contains("min_val") && !range.at("min_val").is_null()) limits.min = range.at("min_val");
        if (range.contains("max_val") && !range.at("max_val").is_null()) limits.max = range.at("max_val");
      }
      read_module(json.at("graph_module"));
    } catch (const Json::exception& error) {
      archive_.refuse(std::string("its program is damaged: ") + error.what());
    } catch (const c10::Error& error) {
      archive_.refuse(std::string("its program is damaged: ") + error.what_without_backtrace());
    }
    return std::move(program_);
  }

 private:
  Json parse(const std::string& record) const {
    return parse_json(archive_.text(record, max_json_bytes), "reading " + record + " in " + program_.file.string());
  }

  /// Refuses fields of a newer format, unless they are empty.
  void check_fields(const Json& object, std::initializer_list<std::string_view> known) const {
    for (const auto& [name, value] : object.items())
      if (std::ranges::find(known, name) == known.end() && !value.is_null() &&
          !(value.is_structured() && value.empty()))
        refuse_version(archive_, "it has a field " + name, version_);
  }

  [[noreturn]] void refuse_object(const std::string& what) const {
    archive_.refuse("the program needs " + what + ", which muster does not run", "Export a model that does without it");
  }

  /// Returns the only entry of an object.
  std::pair<std::string, const Json&> variant(const Json& object) const {
    if (!object.is_object() || object.size() != 1)
      archive_.refuse("its program is damaged: a value in it has several types, or none");
    return {object.begin().key(), object.begin().value()};
  }

  std::string find_model() const {
    std::vector<std::string> found;
    const auto prefix = folder_ + "models/";
    for (const auto& [name, record] : archive_.records())
      if (name.starts_with(prefix) && name.ends_with(".json"))
        found.push_back(name.substr(prefix.size(), name.size() - prefix.size() - 5));
    if (found.size() != 1)
      archive_.refuse("it has " + std::to_string(found.size()) + " exported programs",
                      "Write one program with torch.export.save()");
    return found[0];
  }

  at::ScalarType type_at(const Json& number) const {
    const auto type = scalar_type(number.get<std::int64_t>());
    if (!type) archive_.refuse("it has a type with the unknown number " + std::to_string(number.get<std::int64_t>()));
    return *type;
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

  void check_tensor_fields(const Json& meta) const {
    check_fields(meta, {"dtype", "sizes", "requires_grad", "device", "strides", "storage_offset", "layout"});
  }

  /// Reads the tensors that a config lists. Names of the same bytes with the same shape are one tensor.
  void read_weights(const std::string& config, const std::string& folder) {
    const auto json = parse(folder_ + config);
    std::map<std::string, at::Tensor> storages, views;
    for (const auto& [name, entry] : json.at("config").items()) {
      check_fields(entry, {"path_name", "is_param", "use_pickle", "tensor_meta"});
      const auto& meta = entry.at("tensor_meta");
      if (entry.at("use_pickle").get<bool>() || meta.is_null()) refuse_object("the pickled object " + name);
      check_tensor_fields(meta);
      const auto record = folder_ + folder + entry.at("path_name").get<std::string>();
      auto& view = views[record + json_text(meta)];
      if (!view.defined()) {
        view = read_view(record, name, meta, storages[record]);
        if (entry.at("is_param").get<bool>()) view.set_requires_grad(meta.at("requires_grad").get<bool>());
      }
      stored_[name] = view;
    }
  }

  at::Tensor read_view(const std::string& record, const std::string& name, const Json& meta, at::Tensor& storage) {
    const auto type = type_at(meta.at("dtype"));
    if (meta.at("layout") != 7) refuse_object("the tensor " + name + " of a layout that is not strided");
    if (!storage.defined())
      storage = archive_.values(record, at::kByte, static_cast<std::int64_t>(archive_.bytes_in(record)));
    std::vector<std::int64_t> sizes, strides;
    for (const auto& size : meta.at("sizes")) sizes.push_back(size.at("as_int"));
    for (const auto& stride : meta.at("strides")) strides.push_back(stride.at("as_int"));
    const std::int64_t offset = meta.at("storage_offset").at("as_int"),
                       item_bytes = static_cast<std::int64_t>(c10::elementSize(type)),
                       capacity = storage.numel() / item_bytes;
    // The values must lie inside of the bytes, and be no more than them.
    bool fits = sizes.size() == strides.size() && offset >= 0 && offset <= capacity;
    std::int64_t count = 1, last = offset;
    for (std::size_t i = 0; fits && i < sizes.size(); ++i) {
      std::int64_t span = 0;
      fits = sizes[i] >= 0 && strides[i] >= 0 && !__builtin_mul_overflow(count, sizes[i], &count) &&
             (sizes[i] == 0 ||
              (!__builtin_mul_overflow(sizes[i] - 1, strides[i], &span) && !__builtin_add_overflow(last, span, &last)));
    }
    if (!fits || (count > 0 && last >= capacity) || count > capacity)
      archive_.refuse("its " + name + " is larger than its bytes, or lies outside of them");
    const at::NoGradGuard no_grad;
    auto flat = at::empty({0}, at::TensorOptions(type));
    if (type == at::kBool) storage.clamp_max_(1);  // other bytes are no values of a bool
    flat.set_(storage.storage(), offset, sizes, strides);
    return flat;
  }

  void read_module(const Json& module) {
    check_fields(module, {"graph", "signature", "module_call_graph", "metadata", "treespec_namedtuple_fields"});
    const auto &graph = module.at("graph"), &signature = module.at("signature");
    check_fields(signature, {"input_specs", "output_specs"});
    const auto& calls = module.at("module_call_graph");
    const auto& call = calls.at(0).at("signature");
    program_.in_tree = read_tree(call.at("in_spec"));
    program_.out_tree = read_tree(call.at("out_spec"));
    if (const auto at = call.find("forward_arg_names"); at != call.end() && !at->is_null())
      program_.arguments = at->get<std::vector<std::string>>();

    Names names;
    const auto &inputs = graph.at("inputs"), &specs = signature.at("input_specs");
    if (inputs.size() != specs.size()) archive_.refuse("its program is damaged: its inputs are not those it lists");
    for (std::size_t i = 0; i < specs.size(); ++i) read_input(inputs[i], specs[i], graph, names);
    const auto outputs = read_graph(graph, 0, names);

    const auto& output_specs = signature.at("output_specs");
    if (outputs.size() != output_specs.size())
      archive_.refuse("its program is damaged: its outputs are not those it lists");
    for (std::size_t i = 0; i < outputs.size(); ++i) read_output(outputs[i], output_specs[i], names);
    check_leaves(program_.in_tree, program_.inputs.size(), "inputs");
    check_leaves(program_.out_tree, program_.outputs.size(), "outputs");
    if (const auto& in = program_.in_tree;
        in.children.size() != 2 || in.children[0].kind != Tree::Kind::tuple || in.children[1].kind != Tree::Kind::dict)
      archive_.refuse("its program is damaged: its inputs are not arguments of a call");
    for (const auto& [name, value] : stored_)
      if (std::ranges::none_of(program_.tensors, [&](const auto& tensor) { return tensor.name == name; }) &&
          !constants_.contains(name))
        program_.tensors.push_back({.name = name, .is_parameter = value.requires_grad(), .value = value});
    program_.slot_count = next_;
    mark_last_uses();
  }

  Tree read_tree(const std::string& text) const {
    const auto json = parse_json(text, "reading a signature in " + program_.file.string());
    if (json.at(0) != 1) archive_.refuse("its signature has another version");
    return read_tree_node(json.at(1));
  }

  Tree read_tree_node(const Json& json) const {
    check_fields(json, {"type", "context", "children_spec"});
    Tree tree;
    if (json.at("type").is_null()) return tree;
    const auto type = json.at("type").get<std::string>();
    if (type == "builtins.tuple" || type == "collections.namedtuple")
      tree.kind = Tree::Kind::tuple;
    else if (type == "builtins.list")
      tree.kind = Tree::Kind::list;
    else if (type == "builtins.dict" || type == "collections.OrderedDict")
      tree.kind = Tree::Kind::dict;
    else
      refuse_object("the class " + type + " among its inputs or outputs");
    for (const auto& child : json.at("children_spec")) tree.children.push_back(read_tree_node(child));
    if (tree.kind == Tree::Kind::dict) {
      for (const auto& key : parse_json(json.at("context").get<std::string>(), "reading a signature"))
        tree.keys.push_back(key.is_number_integer() ? c10::IValue(key.get<std::int64_t>())
                                                    : c10::IValue(key.get<std::string>()));
      if (tree.keys.size() != tree.children.size()) archive_.refuse("its signature has a dict without its keys");
    }
    return tree;
  }

  void check_leaves(const Tree& tree, std::size_t count, const std::string& what) const {
    const auto leaves = [](const auto& self, const Tree& node) -> std::size_t {
      std::size_t sum = node.kind == Tree::Kind::leaf;
      for (const auto& child : node.children) sum += self(self, child);
      return sum;
    };
    if (leaves(leaves, tree) != count) archive_.refuse("its program is damaged: its " + what + " do not fit its tree");
  }

  Slot define(const std::string& name, Names& names) {
    if (!names.try_emplace(name, next_).second)
      archive_.refuse("its program is damaged: two values are called " + name);
    return next_++;
  }

  void read_input(const Json& input, const Json& spec, const Json& graph, Names& names) {
    const auto [kind, value] = variant(spec);
    const auto [form, content] = variant(input);
    const auto tensor = [&](const char* field, bool is_parameter, bool in_state) {
      const std::string name = value.at(field);
      const auto at = stored_.find(name);
      if (at == stored_.end()) archive_.refuse("there is no " + name + " in it");
      const auto slot = define(content.at("name"), names);
      tensor_slots_[name] = slot;
      program_.tensors.push_back({name, is_parameter, kind == "tensor_constant", in_state, slot, at->second});
    };
    if (kind == "parameter") return tensor("parameter_name", true, true);
    if (kind == "buffer") return tensor("buffer_name", false, value.at("persistent").get<bool>());
    if (kind == "tensor_constant") return tensor("tensor_constant_name", false, false);
    Input result;
    if (kind == "constant_input") {
      result.name = value.at("name");
      result.is_constant = true;
      result.constant = read_constant(value.at("value"));
    } else if (kind == "user_input" && form == "as_tensor") {
      result.name = content.at("name");
      result.slot = define(result.name, names);
      const auto& meta = graph.at("tensor_values").at(result.name);
      check_tensor_fields(meta);
      result.dtype = type_at(meta.at("dtype"));
      for (const auto& size : meta.at("sizes")) result.sizes.push_back(read_size(size));
    } else if (kind == "user_input" && form == "as_sym_int") {
      result.name = content.at("as_name");
      result.slot = define(result.name, names);
      result.sizes.push_back(read_size(graph.at("sym_int_values").at(result.name)));
    } else if (kind == "user_input" && form != "as_custom_obj") {
      result.name = "a constant";
      result.is_constant = true;
      result.constant = read_constant(input);
    } else {
      refuse_object("an input of the kind " + kind);
    }
    program_.inputs.push_back(std::move(result));
  }

  Size read_size(const Json& json) const {
    const auto [form, value] = variant(json);
    if (form == "as_int") return {.constant = value.get<std::int64_t>()};
    const auto text = value.at("expr_str").get<std::string>();
    constexpr std::string_view begin = "Symbol('";
    const auto end = text.find('\'', begin.size());
    if (text.starts_with(begin) && end != text.npos && text.find(')') == text.size() - 1)
      return {.symbol = text.substr(begin.size(), end - begin.size())};
    return {};
  }

  c10::IValue read_constant(const Json& json) const {
    const auto [form, value] = variant(json);
    if (form == "as_none") return {};
    if (form == "as_int") return value.get<std::int64_t>();
    if (form == "as_float") return real_at(value);
    if (form == "as_string") return value.get<std::string>();
    if (form == "as_bool") return value.get<bool>();
    refuse_object("a constant of the kind " + form);
  }

  void read_output(const Operand& output, const Json& spec, const Names& names) {
    const auto [kind, value] = variant(spec);
    if (output.kind != Operand::Kind::constant && output.kind != Operand::Kind::value)
      archive_.refuse("its program is damaged: an output is no value");
    const auto mutation = [&](Slot target) { program_.mutations.push_back({output, target}); };
    const auto of_tensor = [&](const char* field) {
      const auto at = tensor_slots_.find(value.at(field).get<std::string>());
      if (at == tensor_slots_.end()) archive_.refuse("its program is damaged: it changes a tensor that is not there");
      return at->second;
    };
    if (kind == "user_output")
      program_.outputs.push_back(output);
    else if (kind == "buffer_mutation")
      mutation(of_tensor("buffer_name"));
    else if (kind == "parameter_mutation")
      mutation(of_tensor("parameter_name"));
    else if (kind == "user_input_mutation")
      mutation(find(value.at("user_input_name"), names));
    else
      refuse_object("an output of the kind " + kind);
  }

  Slot find(const std::string& name, const Names& names) const {
    const auto at = names.find(name);
    if (at == names.end()) archive_.refuse("its program is damaged: it uses " + name + " before it is computed");
    return at->second;
  }

  /// Adds the nodes of a graph to the program. Returns its outputs.
  std::vector<Operand> read_graph(const Json& graph, std::uint32_t scope, Names& names) {
    check_fields(graph, {"inputs", "outputs", "nodes", "tensor_values", "sym_int_values", "sym_bool_values",
                         "is_single_tensor_return", "custom_obj_values", "sym_float_values"});
    for (const auto& node : graph.at("nodes")) read_node(node, scope, names);
    std::vector<Operand> outputs;
    for (const auto& output : graph.at("outputs")) outputs.push_back(read_operand(output, names));
    return outputs;
  }

  void read_node(const Json& json, std::uint32_t scope, Names& names) {
    check_fields(json, {"target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name"});
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
    for (const auto& output : json.at("outputs")) {
      const auto [form, value] = variant(output);
      if (form == "as_none")
        node.outputs.push_back(no_slot);
      else if (form == "as_tensor")
        node.outputs.push_back(define(value.at("name"), names));
      else if (form == "as_sym_int" || form == "as_sym_float" || form == "as_sym_bool")
        node.outputs.push_back(define(value.at("as_name"), names));
      else if (form == "as_tensors" && json.at("outputs").size() == 1) {
        node.returns_list = true;
        for (const auto& item : value) node.outputs.push_back(define(item.at("name"), names));
      } else {
        refuse_node(node, "whose outputs muster does not know");
      }
    }
    const auto returns = node.op ? node.op->schema().returns().size() : 1;
    if (!node.returns_list && node.outputs.size() > returns)
      archive_.refuse("its program is damaged: " + node.name + " does not give so many values");
    if (node.op && node.returns_list && returns != 1) refuse_node(node, "whose outputs muster does not know");
    program_.nodes.push_back(std::move(node));
  }

  [[noreturn]] void refuse_node(const Node& node, const std::string& fact,
                                const std::string& remedy = "Export a model that does without it") const {
    archive_.refuse("the program uses " + node.name + (node.source.empty() ? "" : " in " + node.source) + ", " + fact,
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
      if (const auto [form, type] = variant(inputs.at(1).at("arg")); form != "as_none") scope.dtype = type_at(type);
      scope.enabled = argument(2).toBool();
      if (const auto cache = argument(3); !cache.isNone()) scope.cache = cache.toBool();
      graph_at = 4;
    } else {
      refuse_node(node, "which muster does not run", "Write the model without control flow that depends on data");
    }
    const auto [form, value] = variant(inputs.at(graph_at).at("arg"));
    if (form != "as_graph") archive_.refuse("its program is damaged: " + node.name + " has no graph");
    const auto& graph = value.at("graph");
    Names inner;
    const auto& parameters = graph.at("inputs");
    if (parameters.size() + graph_at + 1 != inputs.size())
      archive_.refuse("its program is damaged: " + node.name + " has other inputs than its graph");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto outer = read_operand(inputs.at(graph_at + 1 + i).at("arg"), names);
      if (outer.kind != Operand::Kind::value) continue;
      if (!inner.try_emplace(name_of(parameters.at(i)), outer.slot).second)
        archive_.refuse("its program is damaged: " + node.name + " has two inputs of one name");
    }
    program_.scopes.push_back(scope);
    const auto outputs = read_graph(graph, static_cast<std::uint32_t>(program_.scopes.size() - 1), inner);
    std::vector<std::string> results;
    for (const auto& output : json.at("outputs")) {
      const auto [kind, content] = variant(output);
      if (kind == "as_tensors")
        for (const auto& item : content) results.push_back(item.at("name"));
      else
        results.push_back(kind == "as_none" ? std::string() : name_of(output));
    }
    if (results.size() > outputs.size()) archive_.refuse("its program is damaged: " + node.name + " has other outputs");
    for (std::size_t i = 0; i < results.size(); ++i)
      if (!results[i].empty() && outputs[i].kind == Operand::Kind::value &&
          !names.try_emplace(results[i], outputs[i].slot).second)
        archive_.refuse("its program is damaged: two values are called " + results[i]);
  }

  std::string name_of(const Json& argument) const {
    const auto [form, value] = variant(argument);
    return value.at(form.starts_with("as_sym_") ? "as_name" : "name");
  }

  void read_operator(const Json& json, Node& node, const Names& names) {
    const auto parts = split(node.name, '.');
    if (parts.size() != 3) refuse_node(node, "which is no operator");
    const std::string space(parts[0]), name = space + "::" + std::string(parts[1]),
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
    std::map<std::string, const Json*> given;
    for (const auto& input : json.at("inputs")) {
      check_fields(input, {"name", "arg", "kind"});
      given[input.at("name").get<std::string>()] = &input.at("arg");
    }
    for (const auto& argument : schema.arguments()) {
      const auto at = given.find(argument.name());
      if (at != given.end()) {
        node.operands.push_back(
            convert(read_operand(*at->second, names), argument.type(), argument.N(), node, argument.name()));
        given.erase(at);
      } else if (argument.default_value()) {
        node.operands.push_back({.constant = *argument.default_value()});
      } else {
        refuse_node(node, "without its argument " + argument.name());
      }
    }
    if (!given.empty()) refuse_node(node, "which has no argument " + given.begin()->first);
    // Export notes the type and device of each tensor that it converts. Here both follow the model and autocast.
    if (node.name == "aten._assert_tensor_metadata.default")
      for (std::size_t i = 3; i < node.operands.size(); ++i) node.operands[i] = {};
    node.mode = find_mode(node);
  }

  /// Brings an operand into the type that an operator takes, as Python does.
  Operand convert(Operand operand, const c10::TypePtr& type, std::optional<std::int32_t> count, const Node& node,
                  const std::string& argument) const {
    using Kind = Operand::Kind;
    const auto fail = [&] { refuse_node(node, "whose argument " + argument + " is not of its type " + type->str()); };
    auto& constant = operand.constant;
    const bool is_constant = operand.kind == Kind::constant;
    switch (type->kind()) {
      case c10::TypeKind::OptionalType:
        if (is_constant && constant.isNone()) return operand;
        return convert(std::move(operand), type->castRaw<c10::OptionalType>()->getElementType(), count, node, argument);
      case c10::TypeKind::TensorType:
        if (operand.kind == Kind::value)
          operand.kind = Kind::number_as_tensor;
        else if (is_constant && constant.isScalar())
          constant = number_as_tensor(constant);
        else
          fail();
        return operand;
      case c10::TypeKind::FloatType:
        if (operand.kind == Kind::value)
          operand.kind = Kind::number_as_float;
        else if (is_constant && constant.isInt())
          constant = static_cast<double>(constant.toInt());
        else if (!is_constant || !constant.isDouble())
          fail();
        return operand;
      case c10::TypeKind::IntType:
        if (operand.kind != Kind::value && !(is_constant && constant.isInt())) fail();
        return operand;
      case c10::TypeKind::BoolType:
        if (operand.kind != Kind::value && !(is_constant && constant.isBool())) fail();
        return operand;
      case c10::TypeKind::NumberType:
        if (operand.kind != Kind::value && !(is_constant && constant.isScalar())) fail();
        return operand;
      case c10::TypeKind::StringType:
        if (!is_constant || !constant.isString()) fail();
        return operand;
      case c10::TypeKind::DeviceObjType:
        if (operand.kind != Kind::device) fail();
        return operand;
      case c10::TypeKind::ListType: {
        const auto item_type = type->castRaw<c10::ListType>()->getElementType();
        if (operand.kind != Kind::list) {  // one number for all
          if (!count || *count < 1 || *count > 8) fail();
          Operand list{.kind = Kind::list};
          list.items.assign(static_cast<std::size_t>(*count), operand);
          operand = std::move(list);
        }
        operand.item_type = item_type;
        bool all_constant = true;
        for (auto& item : operand.items) {
          item = convert(std::move(item), item_type, std::nullopt, node, argument);
          all_constant = all_constant && item.kind == Kind::constant;
        }
        if (!all_constant) return operand;
        c10::impl::GenericList list(item_type);
        for (const auto& item : operand.items) list.push_back(item.constant);
        return {.constant = list};
      }
      default:
        fail();
        return operand;
    }
  }

  static c10::IValue number_as_tensor(const c10::IValue& number) {
    auto tensor = at::scalar_to_tensor(number.toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  Operand read_operand(const Json& json, const Names& names) const {
    using Kind = Operand::Kind;
    const auto [form, value] = variant(json);
    const auto by_name = [&](const Json& name) { return Operand{.kind = Kind::value, .slot = find(name, names)}; };
    const auto symbolic = [&](const Json& number) {
      const auto [kind, content] = variant(number);
      return kind == "as_name" ? by_name(content) : Operand{.constant = read_constant(number)};
    };
    const auto list = [&](const auto& read) {
      Operand result{.kind = Kind::list};
      for (const auto& item : value) result.items.push_back(read(item));
      return result;
    };
    if (form == "as_tensor") return by_name(value.at("name"));
    if (form == "as_tensors") return list([&](const Json& item) { return by_name(item.at("name")); });
    if (form == "as_optional_tensor") return optional_tensor(value, names);
    if (form == "as_optional_tensors") return list([&](const Json& item) { return optional_tensor(item, names); });
    if (form == "as_sym_int" || form == "as_sym_float" || form == "as_sym_bool") return symbolic(value);
    if (form == "as_sym_ints" || form == "as_sym_floats" || form == "as_sym_bools") return list(symbolic);
    if (form == "as_ints") return list([](const Json& item) { return Operand{.constant = item.get<std::int64_t>()}; });
    if (form == "as_floats") return list([](const Json& item) { return Operand{.constant = real_at(item)}; });
    if (form == "as_bools") return list([](const Json& item) { return Operand{.constant = item.get<bool>()}; });
    if (form == "as_strings")
      return list([](const Json& item) { return Operand{.constant = item.get<std::string>()}; });
    if (form == "as_scalar_type") return {.constant = static_cast<std::int64_t>(type_at(value))};
    if (form == "as_memory_format") {
      constexpr std::array formats{at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
                                   at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::Preserve};
      const auto number = value.get<std::int64_t>();
      if (number < 1 || number > 4) archive_.refuse("its program has an unknown memory format");
      return {.constant = static_cast<std::int64_t>(formats[static_cast<std::size_t>(number - 1)])};
    }
    if (form == "as_layout") {
      if (value != 7) refuse_object("tensors of a layout that is not strided");
      return {.constant = static_cast<std::int64_t>(at::kStrided)};
    }
    if (form == "as_device") return {.kind = Kind::device, .constant = device_at(value)};
    if (form == "as_complex")
      return {.constant = c10::complex<double>(real_at(value.at("real")), real_at(value.at("imag")))};
    if (form == "as_custom_obj") refuse_object("the object " + value.at("class_fqn").get<std::string>());
    return {.constant = read_constant(json)};
  }

  Operand optional_tensor(const Json& json, const Names& names) const {
    const auto [form, value] = variant(json);
    if (form == "as_none") return {};
    return {.kind = Operand::Kind::value, .slot = find(value.at("name"), names)};
  }

  Mode find_mode(const Node& node) {
    Mode mode;
    const auto& arguments = node.op->schema().arguments();
    const auto position = [&](std::string_view name) {
      return static_cast<std::size_t>(
          std::ranges::find_if(arguments, [&](const auto& argument) { return argument.name() == name; }) -
          arguments.begin());
    };
    const auto is_none = [&](std::string_view name) {
      const auto at = position(name);
      return at < arguments.size() && node.operands[at].kind == Operand::Kind::constant &&
             node.operands[at].constant.isNone();
    };
    for (const auto* const name : {"train", "training", "use_input_stats"})
      if (const auto at = position(name); at < arguments.size()) {
        mode.argument = static_cast<int>(at);
        mode.in_evaluation = false;
      }
    if (const auto at = position("dropout_p"); at < arguments.size()) {
      mode.argument = static_cast<int>(at);
      mode.in_evaluation = 0.0;
    }
    // Without running statistics, a norm uses the batch's in evaluation too.
    if (is_none("running_mean")) mode = {};
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

  Archive archive_;
  const std::vector<std::string>& namespaces_;
  Program program_;
  std::string folder_, version_;
  std::map<std::string, at::Tensor> stored_;  ///< the tensors of the file
  std::set<std::string> constants_;           ///< those of them that are not in Python's state_dict()
  std::map<std::string, Slot> tensor_slots_;
  Slot next_ = 0;
  int batch_norms_ = 0;
};

}  // namespace

std::optional<at::ScalarType> scalar_type(std::int64_t number) {
  static const std::map<std::int64_t, at::ScalarType> others{
      {13, at::kBFloat16},       {28, at::kUInt16},          {29, at::kFloat8_e4m3fn},
      {30, at::kFloat8_e5m2},    {31, at::kFloat8_e4m3fnuz}, {32, at::kFloat8_e5m2fnuz},
      {33, at::kFloat8_e8m0fnu}, {34, at::kUInt32},          {35, at::kUInt64}};
  if (number >= 1 && number <= 12) return static_cast<at::ScalarType>(number - 1);  // the same order
  const auto at = others.find(number);
  return at == others.end() ? std::nullopt : std::optional(at->second);
}

std::string check_version(const Archive& archive, std::int64_t major, std::int64_t minor) {
  auto version = std::to_string(major) + "." + std::to_string(minor);
  if (major != known_major) refuse_version(archive, "its format is another", version);
  return version;
}

Program read_program(const std::filesystem::path& file, const std::vector<std::string>& namespaces) {
  return Reader(file, namespaces).read();
}

}  // namespace muster::detail::weights::exported
