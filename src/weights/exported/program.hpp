// A program of torch.export in memory: checked, with each operator looked up, so that running it is a loop over nodes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::weights {
class Archive;
}

namespace muster::detail::weights::exported {

/// The number of a value: an input, or what a node returns.
using Slot = std::uint32_t;
inline constexpr Slot no_slot = std::numeric_limits<Slot>::max();

/// Arithmetic of sizes, by Python's rules.
using Arithmetic = c10::IValue (*)(at::ArrayRef<c10::IValue> numbers);
/// Returns the function for a target such as "_operator.mul"; nullptr if none takes so many operands.
Arithmetic find_arithmetic(const std::string& target, std::size_t operands);

/// True for operators of `aten` that a file may use: none that reach files or memory by themselves, or that leave
/// checks to their callers.
bool is_allowed(const c10::FunctionSchema& schema);

/// An argument of a node.
struct Operand {
  enum class Kind : std::uint8_t { constant, device, value, number_as_float, number_as_tensor, list };
  Kind kind = Kind::constant;
  bool last_use = false;  ///< nothing uses the value after this
  Slot slot = no_slot;
  c10::IValue constant = {};         ///< of a device: that of the export
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
  std::optional<c10::OperatorHandle> op = {};  ///< or
  Arithmetic arithmetic = nullptr;
  std::vector<Operand> operands = {};
  std::vector<Slot> outputs = {};  ///< no_slot for those that nothing uses
  bool returns_list = false;       ///< `outputs` are the items of the only value
  std::uint32_t scope = 0;         ///< in Program::scopes
  Mode mode = {};
  std::string module = {}, module_class = {};  ///< path and Python class of the innermost module
  std::string source = {};                     ///< as in "net.py:14 (h = self.fc(x))"; may be empty
};

/// A `with` block around nodes: torch.set_grad_enabled(), or torch.autocast() if there is a device. Scope 0 is none.
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
};

/// A parameter, buffer or constant.
struct NamedTensor {
  std::string name;
  bool is_parameter = false, is_constant = false;
  bool in_state = true;  ///< in Python's state_dict()
  Slot slot = no_slot;
  at::Tensor value = {};  ///< equal handles for tied weights
};

/// A size of an input. An expression of symbols is neither.
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
  std::vector<Size> sizes = {};              ///< of a tensor; of a number, one
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
  std::filesystem::path file;
  std::vector<Node> nodes = {};
  std::vector<Scope> scopes = {Scope{}};
  Slot slot_count = 0;
  std::vector<NamedTensor> tensors = {};
  std::vector<Input> inputs = {};
  std::map<std::string, Range> ranges = {};  ///< of symbols
  std::vector<Mutation> mutations = {};
  std::vector<Operand> outputs = {};
  Tree in_tree = {}, out_tree = {};         ///< of inputs: a tuple of the positional ones and a dict
  bool keep_random = false;                 ///< ExportedOptions::keep_random
  std::vector<std::string> arguments = {};  ///< names of the positional inputs, then of the others
};

/// The type with this number in the format; none if there is no such type.
std::optional<at::ScalarType> scalar_type(std::int64_t number);

/// Refuses a file of another version of the format than muster knows. Returns the version's text.
std::string check_version(const Archive& archive, std::int64_t major, std::int64_t minor);

/// Reads and checks a file. Throws an Error (ExitCode::data) that names it.
Program read_program(const std::filesystem::path& file, const std::vector<std::string>& namespaces);

}  // namespace muster::detail::weights::exported
