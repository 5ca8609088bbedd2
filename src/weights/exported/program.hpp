// A program of torch.export in memory: checked, with each operator looked up, so that running it is a loop over nodes;
// and its file, whose format is in torch/_export/serde/schema.py of torch's Python package.
#pragma once

#include "base/json.hpp"
#include "weights/archive.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::weights::exported {

/// The number of a value: an input, or what a node returns.
using Slot = std::uint32_t;
inline constexpr Slot no_slot = std::numeric_limits<Slot>::max();

/// Arithmetic of sizes, by Python's rules.
using Arithmetic = c10::IValue (*)(at::ArrayRef<c10::IValue> numbers);
/// Returns the function for a target such as "_operator.mul"; nullptr if none takes so many operands.
Arithmetic find_arithmetic(const std::string& target, std::size_t operands);

/// True for operators of `aten` that a file may use. An operator may not reach files or memory by itself. If it leaves
/// checks of its arguments to its callers, find_check() must have them.
bool is_allowed(const c10::FunctionSchema& schema);

/// Checks the arguments of an operator that leaves this to its callers; throws c10::Error.
using Check = void (*)(at::ArrayRef<c10::IValue> arguments);
/// Returns the check for an operator; nullptr if the operator checks its arguments itself.
Check find_check(const c10::FunctionSchema& schema);

/// Returns the number as a tensor of no dimensions, which does not decide the type of a result (a wrapped number).
at::Tensor number_as_tensor(const c10::IValue& number);

/// An argument of a node.
struct Operand {
  enum class Kind : std::uint8_t { constant, device, value, number_as_float, number_as_tensor, list };
  Kind kind = Kind::constant;
  bool last_use = false;  ///< nothing uses the value after this
  Slot slot = no_slot;
  c10::IValue constant = {};         ///< for Kind::device: the device of the export
  std::vector<Operand> items = {};   ///< of a list
  c10::TypePtr item_type = nullptr;  ///< of a list
};

/// How an operator depends on train() and eval().
struct Mode {
  int argument = -1;               ///< position of the argument that is the mode; -1 if there is none
  c10::IValue in_evaluation = {};  ///< its value in evaluation
  bool counts_batches = false;     ///< adds to num_batches_tracked, which only training does
  bool random = false;             ///< draws random numbers, and has no argument to switch that off
  int batch_norm = -1;             ///< number among the batch-norms that training can synchronise; -1 for other nodes
};

struct Node {
  std::string name;                            ///< as in "aten.linear.default"
  std::optional<c10::OperatorHandle> op = {};  ///< none if the node is `arithmetic`
  Arithmetic arithmetic = nullptr;
  Check check = nullptr;  ///< of the operator's arguments
  std::vector<Operand> operands = {};
  std::vector<Slot> outputs = {};  ///< no_slot for outputs that nothing uses
  bool returns_list = false;       ///< true if the node returns one list, and `outputs` are its items
  std::uint32_t scope = 0;         ///< in Program::scopes
  Mode mode = {};
  std::string module = {}, module_class = {};  ///< path and Python class of the innermost module
  std::string source = {};                     ///< as in "net.py:14 (h = self.fc(x))"; may be empty
};

/// A `with` block around nodes: torch.set_grad_enabled(), or torch.autocast() if there is a device. Scope 0 stands for
/// the nodes outside of all blocks.
struct Scope {
  std::uint32_t parent = 0;
  bool enabled = true;
  std::optional<c10::DeviceType> device = {};
  std::optional<at::ScalarType> dtype = {};
  bool cache = true;
};

/// A tree of tuples, lists and dicts, whose leaves are inputs or outputs in order. A named tuple is a tuple.
struct Tree {
  enum class Kind : std::uint8_t { leaf, tuple, list, dict };
  Kind kind = Kind::leaf;
  std::vector<c10::IValue> keys = {};  ///< of a dict: strings or integers
  std::vector<Tree> children = {};
  std::size_t leaf_count() const;
};

/// A parameter, buffer or constant.
struct NamedTensor {
  std::string name;
  bool is_parameter = false, is_constant = false;
  bool in_state = true;  ///< in Python's state_dict()
  Slot slot = no_slot;
  at::Tensor value = {};  ///< equal handles for tied weights
};

/// A size of an input: a constant or a symbol. Both are empty for an expression of symbols, which is not checked.
struct Size {
  std::optional<std::int64_t> constant = {};
  std::optional<std::string> symbol = {};
};

/// An input of the model: a tensor, a number, or a constant, which may only have the value of the export.
struct Input {
  std::string name;
  Slot slot = no_slot;
  bool is_constant = false;
  c10::IValue constant = {};
  std::optional<at::ScalarType> dtype = {};  ///< of a tensor
  std::vector<Size> sizes = {};              ///< of a tensor; a number has one: the number itself
};

/// An output that is written back into a tensor or an input of the model.
struct Mutation {
  Operand value;
  Slot target = no_slot;
};

struct Range {
  std::int64_t min = std::numeric_limits<std::int64_t>::min(), max = std::numeric_limits<std::int64_t>::max();
};

struct Program {
  std::vector<Node> nodes = {};
  std::vector<Scope> scopes = {Scope{}};
  Slot slot_count = 0;
  std::vector<NamedTensor> tensors = {};
  std::vector<Input> inputs = {};
  std::map<std::string, Range> ranges = {};  ///< by symbol: which values it may have
  std::vector<Mutation> mutations = {};
  std::vector<Operand> outputs = {};
  Tree in_tree = {}, out_tree = {};         ///< `in_tree`: a tuple of positional inputs, and a dict of named ones
  bool keep_random = false;                 ///< ExportedOptions::keep_random
  std::vector<std::string> arguments = {};  ///< names of the positional inputs, then of the named ones
};

/// The type with this number in the format; none if there is no such type.
std::optional<at::ScalarType> scalar_type(std::int64_t number);

struct StoredTensor {
  at::Tensor value = {};
  bool is_parameter = false;
};

/// An archive with one program, in a version of the format that muster knows. All functions throw an Error
/// (ExitCode::data) that names the file if it is damaged.
class ProgramFile : public Archive {
 public:
  explicit ProgramFile(const std::filesystem::path& path);

  /// The folder of all records, with a slash.
  const std::string& root() const noexcept { return root_; }
  /// The record of the graph.
  const Json& program() const noexcept { return program_; }
  /// The name of the record that lists the tensors of a folder, "weights" or "constants".
  std::string config_of(const std::string& folder) const;
  /// Reads the tensors of a folder. Entries with the same record and the same description become one tensor: they are
  /// tied in Python.
  std::map<std::string, StoredTensor> read_tensors(const std::string& folder) const;

  Json json(const std::string& record) const { return parse(text(record, max_json_bytes), record); }
  /// `what`: the part of the file that has the text.
  Json parse(std::string_view text, const std::string& what) const;
  /// Refuses fields of a newer format, unless they are empty.
  void check_fields(const Json& object, std::initializer_list<std::string_view> known) const;
  /// Returns the integer. Refuses floating-point numbers, which a cast would change.
  std::int64_t integer_at(const Json& number) const;
  at::ScalarType type_at(const Json& number) const;
  /// Checks the fields of a tensor's description, and returns its type.
  at::ScalarType tensor_type(const Json& meta) const;

  [[noreturn]] void refuse_damaged(const std::string& fact) const;
  [[noreturn]] void refuse_object(const std::string& what) const;

 private:
  void find_program();
  [[noreturn]] void refuse_version(const std::string& fact) const;
  at::Tensor read_view(const std::string& record, const std::string& name, const Json& meta, at::Tensor& storage) const;

  std::string root_, model_, version_;
  Json program_;
};

/// Reads and checks a file. Throws an Error (ExitCode::data) that names it.
Program read_program(const std::filesystem::path& file, const std::vector<std::string>& namespaces);

}  // namespace muster::detail::weights::exported
