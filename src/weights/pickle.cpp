#include "weights/pickle.hpp"

#include "base/json.hpp"
#include "base/text.hpp"
#include "state/stateful.hpp"
#include "weights/weights_file.hpp"

#include <ATen/ops/_neg_view.h>
#include <ATen/ops/conj.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace muster::detail::weights {
namespace {

/// The name of a class or function, such as "collections.OrderedDict".
struct Global {
  std::string name;
};
/// A reference to a storage. One without a type holds bytes: the tensors over it say their type.
struct StorageRef {
  std::string key;
  std::optional<at::ScalarType> type;
  std::int64_t count;
};
struct PickleValue;
using PickleValues = std::vector<const PickleValue*>;
struct List {
  PickleValues items;
};
struct Tuple {
  PickleValues items;
};
struct Dict {
  std::vector<std::pair<const PickleValue*, const PickleValue*>> items;
};
struct PickleValue : std::variant<std::monostate, bool, std::int64_t, double, std::string, Global, StorageRef,
                                  at::Tensor, List, Tuple, Dict> {
  using variant::variant;
};

/// Types that have a storage class in torch.
constexpr at::ScalarType storage_types[] = {at::kByte,   at::kChar, at::kShort,        at::kInt,
                                            at::kLong,   at::kHalf, at::kBFloat16,     at::kFloat,
                                            at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble};
constexpr std::string_view untyped_storage = "torch.storage.UntypedStorage";
/// Newer types, which have no storage class. A tensor of such a type names the type itself.
constexpr at::ScalarType tensor_types[] = {at::kUInt16,          at::kUInt32,          at::kUInt64,
                                           at::kComplexHalf,     at::kFloat8_e5m2,     at::kFloat8_e4m3fn,
                                           at::kFloat8_e5m2fnuz, at::kFloat8_e4m3fnuz, at::kFloat8_e8m0fnu};

std::string storage_name(at::ScalarType type) { return str("torch.", c10::toString(type), "Storage"); }
std::string tensor_name(at::ScalarType type) { return std::string("torch.").append(c10::getDtypeNames(type).first); }

at::ScalarType find_type(std::span<const at::ScalarType> types, const std::string& name,
                         std::string (*name_of)(at::ScalarType)) {
  const auto known = std::ranges::find(types, name, name_of);
  if (known == types.end())
    throw BadPickle("it holds tensors of the type " + name + ", which is not known here",
                    "Save them in another type, such as tensor.float()");
  return *known;
}

/// Runs a pickle, which is a program for a stack machine. Owns all values, so they may refer to each other in any way,
/// also in cycles.
class Unpickler {
 public:
  Unpickler(std::string_view pickle, const StorageReader& storages) : pickle_(pickle), storages_(storages) {}

  const PickleValue& run() {
    for (;;) {
      const char opcode = take(1).front();
      if (opcode == '.') return *pop();
      step(static_cast<unsigned char>(opcode));
    }
  }

 private:
  void step(unsigned char opcode) {
    if (opcode == 0x80) return check_protocol();
    if (opcode == 'N') return push(std::monostate());
    if (opcode == 0x88) return push(true);
    if (opcode == 0x89) return push(false);
    if (opcode == 'K') return push(std::int64_t{number<std::uint8_t>()});
    if (opcode == 'M') return push(std::int64_t{number<std::uint16_t>()});
    if (opcode == 'J') return push(std::int64_t{number<std::int32_t>()});
    if (opcode == 0x8a) return push(long_integer());
    if (opcode == 'G') return push(std::bit_cast<double>(__builtin_bswap64(number<std::uint64_t>())));
    if (opcode == 'X') return push(std::string(take(number<std::uint32_t>())));
    if (opcode == 0x8c) return push(std::string(take(number<std::uint8_t>())));
    if (opcode == 0x8d) return push(std::string(take(number<std::uint64_t>())));
    if (opcode == 0x95) return static_cast<void>(take(sizeof(std::uint64_t)));  // a hint how much to read ahead
    if (opcode == 'c') return push_global();
    if (opcode == 0x93) return push_global(pop(2));
    if (opcode == '(') return marks_.push_back(stack_.size());
    if (opcode == ')') return push(Tuple());
    if (opcode == ']') return push(List());
    if (opcode == '}') return push(Dict());
    if (opcode == 't') return push(Tuple{pop_to_mark()});
    if (opcode == 0x85) return push(Tuple{pop(1)});
    if (opcode == 0x86) return push(Tuple{pop(2)});
    if (opcode == 0x87) return push(Tuple{pop(3)});
    if (opcode == 'a') return append(pop(1));
    if (opcode == 'e') return append(pop_to_mark());
    if (opcode == 's') return set(pop(2));
    if (opcode == 'u') return set(pop_to_mark());
    if (opcode == 'q') return memorize(number<std::uint8_t>());
    if (opcode == 'r') return memorize(number<std::uint32_t>());
    if (opcode == 0x94) return memorize(static_cast<std::uint32_t>(memo_.size()));
    if (opcode == 'h') return recall(number<std::uint8_t>());
    if (opcode == 'j') return recall(number<std::uint32_t>());
    if (opcode == 'Q') return push_storage(*pop());
    if (opcode == 'R' || opcode == 0x81) return call(pop(2));  // a function's result; a class's instance
    if (opcode == 'b') return build(pop(1));
    throw BadPickle(str("its pickle has the instruction ", opcode, ", which no state dict needs"));
  }

  // --- The program, the stack, the memo ---

  std::string_view take(std::uint64_t bytes) {
    if (bytes > pickle_.size()) throw BadPickle("its pickle is truncated");
    const auto taken = pickle_.substr(0, bytes);
    pickle_.remove_prefix(bytes);
    return taken;
  }
  /// Reads a little-endian number; this machine is little-endian too.
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string line() {
    const auto end = pickle_.find('\n');
    if (end == std::string_view::npos) throw BadPickle("its pickle is truncated");
    std::string text(take(end));
    take(1);
    return text;
  }

  template <class Value>
  void push(Value value) {
    values_.emplace_back(std::move(value));
    stack_.push_back(&values_.back());
  }
  /// Pops `count` values. Values below the top mark cannot be popped.
  PickleValues pop(std::size_t count) {
    if (stack_.size() - (marks_.empty() ? 0 : marks_.back()) < count)
      throw BadPickle("its pickle takes a value that is not there");
    PickleValues taken(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return taken;
  }
  const PickleValue* pop() { return pop(1).front(); }
  PickleValues pop_to_mark() {
    if (marks_.empty()) throw BadPickle("its pickle takes a value that is not there");
    const auto mark = marks_.back();
    auto taken = pop(stack_.size() - mark);
    marks_.pop_back();
    return taken;
  }
  PickleValue& top() {
    if (stack_.empty()) throw BadPickle("its pickle takes a value that is not there");
    return *stack_.back();
  }
  void memorize(std::uint32_t index) { memo_[index] = &top(); }
  void recall(std::uint32_t index) {
    const auto at = memo_.find(index);
    if (at == memo_.end()) throw BadPickle("its pickle takes a value that is not there");
    stack_.push_back(at->second);
  }

  template <class Kind>
  static const Kind& as(const PickleValue& value, const char* what) {
    if (const auto* found = std::get_if<Kind>(&value)) return *found;
    throw BadPickle(str("its pickle puts something else in the place of ", what));
  }

  // --- The instructions ---

  void check_protocol() {
    if (const int version = number<std::uint8_t>(); version < 2 || version > 5)
      throw BadPickle(str("its pickle is of protocol ", version, ", and 2 to 5 are known here"),
                      "Save it with torch.save() without pickle_protocol");
  }

  std::int64_t long_integer() {
    const auto bytes = take(number<std::uint8_t>());
    if (bytes.size() > sizeof(std::int64_t)) throw BadPickle("it holds a number that does not fit 64 bits");
    std::int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }

  void push_global() {
    auto module = line();
    push(Global{std::move(module += "." + line())});
  }

  void push_global(const PickleValues& names) {
    constexpr const char* what = "the name of a class or function";
    push(Global{as<std::string>(*names[0], what) + "." + as<std::string>(*names[1], what)});
  }

  void append(const PickleValues& items) {
    auto* const list = std::get_if<List>(&top());
    if (list == nullptr) throw BadPickle("its pickle appends to something that is not a list");
    list->items.insert(list->items.end(), items.begin(), items.end());
  }

  void set(const PickleValues& items) {
    auto* const dict = std::get_if<Dict>(&top());
    if (dict == nullptr || items.size() % 2 != 0)
      throw BadPickle("its pickle sets items of something that is not a dict");
    for (std::size_t i = 0; i < items.size(); i += 2) dict->items.emplace_back(items[i], items[i + 1]);
  }

  /// Ignores the attributes of a dict. Torch stores versions of modules there, which are not needed.
  void build(const PickleValues&) { as<Dict>(top(), "a dict"); }

  void push_storage(const PickleValue& id) {
    const auto& items = as<Tuple>(id, "a storage").items;
    if (items.size() != 5 || as<std::string>(*items[0], "a storage") != "storage")
      throw BadPickle("its pickle refers to something that is not a storage");
    const auto& type = as<Global>(*items[1], "a storage's type").name;
    std::optional<at::ScalarType> known;
    if (type != untyped_storage) known = find_type(storage_types, type, storage_name);
    push(StorageRef{as<std::string>(*items[2], "a storage's key"), known,
                    as<std::int64_t>(*items[4], "a storage's size")});
  }

  void call(const PickleValues& call) {
    const auto& name = as<Global>(*call[0], "a function").name;
    const auto& arguments = as<Tuple>(*call[1], "arguments").items;
    if (name == "collections.OrderedDict" && arguments.empty()) return push(Dict());
    const auto metadata = [&](std::size_t at) { return at < arguments.size() ? arguments[at] : nullptr; };
    if (name == "torch._utils._rebuild_tensor_v2" && arguments.size() >= 4)
      return push(viewed(tensor(arguments, std::nullopt), metadata(6)));
    if (name == "torch._utils._rebuild_tensor_v3" && arguments.size() >= 7)
      return push(viewed(
          tensor(arguments, find_type(tensor_types, as<Global>(*arguments[6], "a tensor's type").name, tensor_name)),
          metadata(7)));
    if (name == "torch._utils._rebuild_parameter" && !arguments.empty())
      return push(as<at::Tensor>(*arguments[0], "a parameter"));
    throw BadPickle("it wants to call " + name +
                    ", and only the functions that make tensors of plain values are allowed");
  }

  /// Sets torch's conjugate and negative bits, which a view may have in place of values of its own, as the metadata
  /// {"conj": bool, "neg": bool} says; null for none.
  static at::Tensor viewed(at::Tensor tensor, const PickleValue* metadata) {
    constexpr const char* what = "a tensor's metadata";
    if (metadata == nullptr || std::holds_alternative<std::monostate>(*metadata)) return tensor;
    const auto type = tensor.scalar_type();
    for (const auto& [key, value] : as<Dict>(*metadata, what).items) {
      const auto& name = as<std::string>(*key, what);
      if (name != "conj" && name != "neg")
        throw BadPickle("a tensor in it has metadata of the name " + name + ", and only conj and neg are known",
                        "Call .clone() on it before it is saved");
      if (!as<bool>(*value, what)) continue;
      const bool fits = name == "conj" ? c10::isComplexType(type) : has_negative(type);
      if (!fits) throw BadPickle("a tensor in it has the metadata " + name + ", which its type cannot have");
      tensor = name == "conj" ? tensor.conj() : at::_neg_view(tensor);
    }
    return tensor;
  }
  /// True if torch computes the negative of the type.
  static bool has_negative(at::ScalarType type) {
    return (has_storage_class(type) && type != at::kBool) || type == at::kComplexHalf;
  }

  /// Builds a tensor from the arguments (storage, offset, sizes, strides, …). `own_type`: the tensor's,
  /// if the storage has no type.
  at::Tensor tensor(const PickleValues& arguments, std::optional<at::ScalarType> own_type) {
    const auto numbers = [](const PickleValue& tuple, const char* what) {
      std::vector<std::int64_t> values;
      for (const auto* item : as<Tuple>(tuple, what).items) values.push_back(as<std::int64_t>(*item, what));
      return values;
    };
    const auto& storage = as<StorageRef>(*arguments[0], "a storage");
    const auto offset = as<std::int64_t>(*arguments[1], "a tensor's offset");
    const auto sizes = numbers(*arguments[2], "a tensor's shape"),
               strides = numbers(*arguments[3], "a tensor's strides");
    if (storage.type.has_value() == own_type.has_value())
      throw BadPickle("its pickle puts something else in the place of a storage");
    const auto type = own_type ? *own_type : *storage.type;
    const auto width = static_cast<std::int64_t>(c10::elementSize(type));
    const auto stored = own_type ? storage.count / width : storage.count;
    const auto count = values_of_view(type, sizes, strides, offset, stored);
    if (!count) throw BadPickle("a tensor in it is not inside its storage");
    if (*count > stored)  // it would take more memory as soon as it is used
      throw BadPickle("a tensor in it is expanded, so it is larger than its storage",
                      "Call .contiguous() on it before it is saved");
    auto values = storages_(storage.key, storage.type.value_or(at::kByte), storage.count);
    if (own_type) values = values.narrow(0, 0, stored * width).view(type);
    return values.as_strided(sizes, strides, *count > 0 ? offset : 0);
  }

  std::string_view pickle_;
  const StorageReader& storages_;
  std::deque<PickleValue> values_;
  std::vector<PickleValue*> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::uint32_t, PickleValue*> memo_;
};

/// Converts pickled values to tensors by path and JSON. A value may occur several times, even inside itself, so the
/// total output is limited. The limit is far above the size of any pickle whose values occur once.
class Flattened {
 public:
  explicit Flattened(std::size_t pickle_bytes) : left_bytes_(64 * pickle_bytes) {}

  /// Returns the value as JSON. Moves its tensors to `tensors`; returns a discarded value if it is itself a tensor.
  Json take(const PickleValue& value, const std::string& path, int depth) {
    spend(1 + path.size());
    if (depth > max_json_depth) throw BadPickle(str("it is nested more than ", max_json_depth, " levels deep"));
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      if (!tensors.emplace(path, *tensor).second) throw BadPickle("two tensors in it are called " + path);
      return Json(Json::value_t::discarded);
    }
    if (const auto* dict = std::get_if<Dict>(&value)) {
      auto object = Json::object();
      for (const auto& [key, item] : dict->items) {
        const auto name = key_of(*key);
        if (object.contains(name)) throw BadPickle("a dict in it has two of the key " + name);
        if (auto json = take(*item, inside(path, name), depth + 1); !json.is_discarded())
          object[name] = std::move(json);
      }
      return object;
    }
    if (const auto* list = std::get_if<List>(&value)) return take_list(list->items, path, depth);
    if (const auto* tuple = std::get_if<Tuple>(&value)) return take_list(tuple->items, path, depth);
    if (const auto* truth = std::get_if<bool>(&value)) return *truth;
    if (const auto* integer = std::get_if<std::int64_t>(&value)) return *integer;
    if (const auto* real = std::get_if<double>(&value)) return state::value_to_json(*real);
    if (const auto* text = std::get_if<std::string>(&value)) return spend(text->size()), *text;
    if (std::holds_alternative<std::monostate>(value)) return nullptr;
    const auto* const global = std::get_if<Global>(&value);
    throw BadPickle("it holds " + (global != nullptr ? global->name : "a bare storage") +
                    ", which is not a plain value");
  }

  std::map<std::string, at::Tensor> tensors;

 private:
  void spend(std::size_t bytes) {
    if (bytes > left_bytes_) throw BadPickle("it holds the same values again and again");
    left_bytes_ -= bytes;
  }
  Json take_list(const PickleValues& items, const std::string& path, int depth) {
    auto array = Json::array();
    for (std::size_t i = 0; i < items.size(); ++i) {
      auto json = take(*items[i], inside(path, std::to_string(i)), depth + 1);
      array.push_back(json.is_discarded() ? Json() : std::move(json));
    }
    return array;
  }
  static std::string inside(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "/" + name;
  }
  /// Whole numbers are allowed, since optimizers number their state.
  static std::string key_of(const PickleValue& value) {
    if (const auto* text = std::get_if<std::string>(&value)) return *text;
    if (const auto* integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
    throw BadPickle("a dict in it has a key that is neither a string nor a whole number");
  }

  std::size_t left_bytes_;
};

}  // namespace

bool has_storage_class(at::ScalarType type) noexcept {
  return std::ranges::find(storage_types, type) != std::end(storage_types);
}

StateDict unpickle_state_dict(std::string_view pickle, const StorageReader& storages) {
  Unpickler unpickler(pickle, storages);
  const auto& root = unpickler.run();
  if (!std::holds_alternative<Dict>(root)) throw BadPickle("it holds something other than a dict of tensors");
  Flattened flattened(pickle.size());
  auto values = flattened.take(root, "", 0);
  return {.tensors = std::move(flattened.tensors), .values = std::move(values)};
}

}  // namespace muster::detail::weights
