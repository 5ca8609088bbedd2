#include "node/call.hpp"

#include "base/text.hpp"

#include <array>

namespace muster::detail::node {
namespace {

// The bits that each field takes in a word, from the lowest bit on.
constexpr int kind_bits = 4, type_bits = 4, op_bits = 3, root_bits = 17, count_bits = 35, from_all_bits = 1;
static_assert(kind_bits + type_bits + op_bits + root_bits + count_bits + from_all_bits == 64);

constexpr std::uint64_t mask(int bits) { return (std::uint64_t{1} << bits) - 1; }

}  // namespace

std::uint64_t Call::encode() const noexcept {
  std::uint64_t word = 0;
  int at = 0;
  const auto put = [&](std::uint64_t value, int bits) {
    word |= (value & mask(bits)) << at;
    at += bits;
  };
  put(static_cast<std::uint64_t>(kind), kind_bits);
  put(static_cast<std::uint64_t>(type), type_bits);
  put(static_cast<std::uint64_t>(op), op_bits);
  put(static_cast<std::uint64_t>(root + 1), root_bits);
  put(count, count_bits);
  put(from_all, from_all_bits);
  return word;
}

Call Call::decode(std::uint64_t word) noexcept {
  const auto take = [&](int bits) {
    const auto value = word & mask(bits);
    word >>= bits;
    return value;
  };
  Call call;
  call.kind = static_cast<Kind>(take(kind_bits));
  call.type = static_cast<Dtype>(take(type_bits));
  call.op = static_cast<ReduceOp>(take(op_bits));
  call.root = static_cast<int>(take(root_bits)) - 1;
  call.count = take(count_bits);
  call.from_all = take(from_all_bits) != 0;
  return call;
}

std::string nth(std::uint64_t number) {
  const auto last = number % 10;
  const bool plain = number / 10 % 10 != 1 && last >= 1 && last <= 3;
  return str(number, plain ? std::array{"st", "nd", "rd"}[last - 1] : "th");
}

CallMismatch mismatch(int lower, const std::string& its_call, int higher, const std::string& other_call) {
  return {ExitCode::user_error, "comparing what the ranks call",
          str("rank ", lower, " is in ", its_call, ", rank ", higher, " in ", other_call),
          "All ranks of a communicator make the same calls in the same order"};
}

const char* Call::name() const noexcept {
  constexpr std::array kinds{"nothing",
                             "barrier",
                             "broadcast",
                             "all_reduce",
                             "reduce",
                             "reduce_scatter",
                             "all_gather",
                             "all_to_all",
                             "averaging gradients",
                             "making a communicator or memory together",
                             "the end of the attempt",
                             "send",
                             "receive",
                             "waiting for the reader of a stream"};
  const auto number = static_cast<std::size_t>(kind);
  return number < kinds.size() ? kinds[number] : "an unknown call";
}

std::string Call::text() const {
  constexpr std::array types{"uint8",    "int8",    "int16",   "int32",     "int64",      "float16",
                             "bfloat16", "float32", "float64", "complex64", "complex128", "bool"};
  static_assert(types.size() == num_dtypes);
  constexpr std::array ops{"sum", "product", "min", "max", "bit_and", "bit_or", "bit_xor"};
  std::string text = name();
  const bool messages = kind == Kind::send || kind == Kind::receive;
  if (kind == Kind::barrier) return text + "()";
  if ((kind < Kind::broadcast || kind > Kind::all_to_all) && !messages) return text;
  text += str("(", types.at(static_cast<std::size_t>(type)), " [", count, "]");
  if (kind == Kind::all_reduce || kind == Kind::reduce) text += str(", ", ops.at(static_cast<std::size_t>(op)));
  if (messages && root < 0) text += ", any rank";
  if (root >= 0) text += str(messages ? ", rank " : ", root ", root);
  return text + ")";
}

}  // namespace muster::detail::node
