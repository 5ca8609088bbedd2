// Which operators run: those of aten that do no harm, and arithmetic of sizes.
#include "weights/exported/program.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

namespace muster::detail::weights::exported {
namespace {

using Numbers = at::ArrayRef<c10::IValue>;

bool is_integer(const c10::IValue& value) { return value.isInt() || value.isBool(); }
std::int64_t integer(const c10::IValue& value) { return value.isBool() ? value.toBool() : value.toInt(); }
double real(const c10::IValue& value) {
  return is_integer(value) ? static_cast<double>(integer(value)) : value.toDouble();
}

std::int64_t fitting(double value) {
  TORCH_CHECK(std::abs(value) < 9.2e18, "a size is too large: ", value);
  return static_cast<std::int64_t>(value);
}

/// Python's a // b and a % b: rounded down, with the sign of b.
std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  TORCH_CHECK(b != 0 && !(b == -1 && a == std::numeric_limits<std::int64_t>::min()), "a size is divided by ", b);
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}

double modulo(double a, double b) {
  TORCH_CHECK(b != 0, "a number is divided by 0");
  const double rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

c10::IValue power(Numbers n) {
  if (!is_integer(n[0]) || !is_integer(n[1]) || integer(n[1]) < 0) return std::pow(real(n[0]), real(n[1]));
  const auto base = integer(n[0]);
  if (base >= -1 && base <= 1)
    return integer(n[1]) == 0 ? std::int64_t{1} : integer(n[1]) % 2 == 0 ? base * base : base;
  std::int64_t result = 1;
  for (auto left = integer(n[1]); left > 0; --left)
    TORCH_CHECK(!__builtin_mul_overflow(result, base, &result), "a size is too large");
  return result;
}

template <bool (*overflow)(std::int64_t, std::int64_t, std::int64_t*), class Real>
c10::IValue combine(Numbers n, Real of_reals) {
  if (!is_integer(n[0]) || !is_integer(n[1])) return of_reals(real(n[0]), real(n[1]));
  std::int64_t result = 0;
  TORCH_CHECK(!overflow(integer(n[0]), integer(n[1]), &result), "a size is too large");
  return result;
}

bool add(std::int64_t a, std::int64_t b, std::int64_t* sum) { return __builtin_add_overflow(a, b, sum); }
bool subtract(std::int64_t a, std::int64_t b, std::int64_t* sum) { return __builtin_sub_overflow(a, b, sum); }
bool multiply(std::int64_t a, std::int64_t b, std::int64_t* sum) { return __builtin_mul_overflow(a, b, sum); }

/// Integers are compared as such: doubles cannot tell large ones apart.
template <class Compare>
bool compare(Numbers n, Compare holds) {
  return is_integer(n[0]) && is_integer(n[1]) ? holds(integer(n[0]), integer(n[1])) : holds(real(n[0]), real(n[1]));
}

template <class Combine>
c10::IValue bits(Numbers n, Combine of) {
  if (n[0].isBool() && n[1].isBool()) return of(integer(n[0]), integer(n[1])) != 0;
  return of(integer(n[0]), integer(n[1]));
}

std::int64_t shift(Numbers n) {
  TORCH_CHECK(integer(n[1]) >= 0 && integer(n[1]) < 62, "a size is shifted by ", integer(n[1]));
  return std::int64_t{1} << integer(n[1]);
}

c10::IValue rounded(const c10::IValue& number, double (*round)(double)) {
  return is_integer(number) ? integer(number) : fitting(round(real(number)));
}

struct Entry {
  std::size_t count;  ///< of operands
  Arithmetic function;
};

const std::map<std::string_view, Entry>& table() {
  static const std::map<std::string_view, Entry> entries{
      {"_operator.add", {2, [](Numbers n) { return combine<add>(n, std::plus()); }}},
      {"_operator.sub", {2, [](Numbers n) { return combine<subtract>(n, std::minus()); }}},
      {"_operator.mul", {2, [](Numbers n) { return combine<multiply>(n, std::multiplies()); }}},
      {"_operator.neg",
       {1,
        [](Numbers n) {
          return combine<subtract>(std::array<c10::IValue, 2>{0, n[0]}, std::minus());
        }}},
      {"_operator.pos", {1, [](Numbers n) { return n[0]; }}},
      {"_operator.truediv",
       {2,
        [](Numbers n) -> c10::IValue {
          TORCH_CHECK(real(n[1]) != 0, "a number is divided by 0");
          return real(n[0]) / real(n[1]);
        }}},
      {"_operator.floordiv",
       {2,
        [](Numbers n) -> c10::IValue {
          if (is_integer(n[0]) && is_integer(n[1])) return floor_divide(integer(n[0]), integer(n[1]));
          return (real(n[0]) - modulo(real(n[0]), real(n[1]))) / real(n[1]);
        }}},
      {"_operator.mod",
       {2,
        [](Numbers n) -> c10::IValue {
          if (!is_integer(n[0]) || !is_integer(n[1])) return modulo(real(n[0]), real(n[1]));
          return integer(n[0]) - floor_divide(integer(n[0]), integer(n[1])) * integer(n[1]);
        }}},
      {"_operator.pow", {2, power}},
      {"_operator.eq", {2, [](Numbers n) -> c10::IValue { return compare(n, std::equal_to()); }}},
      {"_operator.ne", {2, [](Numbers n) -> c10::IValue { return compare(n, std::not_equal_to()); }}},
      {"_operator.lt", {2, [](Numbers n) -> c10::IValue { return compare(n, std::less()); }}},
      {"_operator.le", {2, [](Numbers n) -> c10::IValue { return compare(n, std::less_equal()); }}},
      {"_operator.gt", {2, [](Numbers n) -> c10::IValue { return compare(n, std::greater()); }}},
      {"_operator.ge", {2, [](Numbers n) -> c10::IValue { return compare(n, std::greater_equal()); }}},
      {"_operator.and_", {2, [](Numbers n) { return bits(n, std::bit_and()); }}},
      {"_operator.or_", {2, [](Numbers n) { return bits(n, std::bit_or()); }}},
      {"_operator.lshift",
       {2,
        [](Numbers n) {
          return combine<multiply>(std::array<c10::IValue, 2>{n[0], shift(n)}, std::multiplies());
        }}},
      {"_operator.rshift", {2, [](Numbers n) -> c10::IValue { return floor_divide(integer(n[0]), shift(n)); }}},
      {"math.trunc", {1, [](Numbers n) { return rounded(n[0], std::trunc); }}},
      {"math.floor", {1, [](Numbers n) { return rounded(n[0], std::floor); }}},
      {"math.ceil", {1, [](Numbers n) { return rounded(n[0], std::ceil); }}},
      {"builtins.round", {1, [](Numbers n) { return rounded(n[0], std::nearbyint); }}},
      {"torch.sym_int", {1, [](Numbers n) { return rounded(n[0], std::trunc); }}},
      {"torch.sym_float", {1, [](Numbers n) -> c10::IValue { return real(n[0]); }}},
      {"torch.sym_not", {1, [](Numbers n) -> c10::IValue { return !n[0].toBool(); }}},
      {"torch.sym_max", {2, [](Numbers n) { return compare(n, std::less()) ? n[1] : n[0]; }}},
      {"torch.sym_min", {2, [](Numbers n) { return compare(n, std::greater()) ? n[1] : n[0]; }}},
      {"torch.sym_ite", {3, [](Numbers n) { return n[0].toBool() ? n[1] : n[2]; }}},
      {"torch.sym_sqrt", {1, [](Numbers n) -> c10::IValue { return std::sqrt(real(n[0])); }}},
      {"torch._sym_sqrt", {1, [](Numbers n) -> c10::IValue { return std::sqrt(real(n[0])); }}},
  };
  return entries;
}

bool begins_with_one_of(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::ranges::any_of(prefixes, [&](auto prefix) { return name.starts_with(prefix); });
}

}  // namespace

Arithmetic find_arithmetic(const std::string& target, std::size_t operands) {
  const auto at = table().find(target);
  return at == table().end() || at->second.count != operands ? nullptr : at->second.function;
}

bool is_allowed(const c10::FunctionSchema& schema) {
  const std::string_view name = std::string_view(schema.name()).substr(schema.name().find("::") + 2);
  // Those that replace a tensor's memory, read a file, or take memory that is packed for a kernel.
  if (begins_with_one_of(name, {"set_", "resize", "from_file", "fbgemm_", "quantized_", "mkldnn_", "cudnn_", "miopen_",
                                "sparse_", "to_padded", "nested_"}))
    return false;
  // Torch's own internal operators leave checks to their callers. These do not, and are what programs have.
  if (name.starts_with('_') && !begins_with_one_of(name, {"_adaptive_avg_pool",
                                                          "_assert_",
                                                          "_batch_norm_",
                                                          "_cdist_",
                                                          "_conj",
                                                          "_convolution",
                                                          "_embedding_bag",
                                                          "_fft_",
                                                          "_fused_rms_norm",
                                                          "_linalg_",
                                                          "_local_scalar_dense",
                                                          "_log_softmax",
                                                          "_native_batch_norm_legit",
                                                          "_neg_view",
                                                          "_pdist_",
                                                          "_prelu_kernel",
                                                          "_safe_softmax",
                                                          "_scaled_dot_product_",
                                                          "_softmax",
                                                          "_to_copy",
                                                          "_trilinear",
                                                          "_unsafe_index",
                                                          "_unsafe_view",
                                                          "_upsample_",
                                                          "_weight_norm"}))
    return false;
  return std::ranges::none_of(schema.arguments(), [](const c10::Argument& argument) {
    const auto kind = argument.type()->kind();
    return kind == c10::TypeKind::StorageType || kind == c10::TypeKind::StreamObjType;
  });
}

}  // namespace muster::detail::weights::exported
