// Which operators run: operators of aten that do no harm, and arithmetic of sizes.
#include "weights/exported/program.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <ranges>
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

c10::IValue true_divide(Numbers n) {
  TORCH_CHECK(real(n[1]) != 0, "a number is divided by 0");
  return real(n[0]) / real(n[1]);
}

c10::IValue floor_divide(Numbers n) {
  if (is_integer(n[0]) && is_integer(n[1])) return floor_divide(integer(n[0]), integer(n[1]));
  return (real(n[0]) - modulo(real(n[0]), real(n[1]))) / real(n[1]);
}

c10::IValue modulo(Numbers n) {
  if (!is_integer(n[0]) || !is_integer(n[1])) return modulo(real(n[0]), real(n[1]));
  return integer(n[0]) - floor_divide(integer(n[0]), integer(n[1])) * integer(n[1]);
}

c10::IValue product(const c10::IValue& a, const c10::IValue& b) {
  return combine<multiply>(std::array{a, b}, std::multiplies());
}

std::int64_t shift(Numbers n) {
  TORCH_CHECK(integer(n[1]) >= 0 && integer(n[1]) < 62, "a size is shifted by ", integer(n[1]));
  return std::int64_t{1} << integer(n[1]);
}

c10::IValue rounded(const c10::IValue& number, double (*round)(double)) {
  return is_integer(number) ? integer(number) : fitting(round(real(number)));
}

struct Entry {
  std::size_t count;  ///< number of operands
  Arithmetic function;
};

const std::map<std::string_view, Entry>& table() {
  static const std::map<std::string_view, Entry> entries{
      {"_operator.add", {2, [](Numbers n) { return combine<add>(n, std::plus()); }}},
      {"_operator.sub", {2, [](Numbers n) { return combine<subtract>(n, std::minus()); }}},
      {"_operator.mul", {2, [](Numbers n) { return combine<multiply>(n, std::multiplies()); }}},
      {"_operator.neg", {1, [](Numbers n) { return product(n[0], -1); }}},
      {"_operator.pos", {1, [](Numbers n) { return n[0]; }}},
      {"_operator.truediv", {2, true_divide}},
      {"_operator.floordiv", {2, floor_divide}},
      {"_operator.mod", {2, modulo}},
      {"_operator.pow", {2, power}},
      {"_operator.eq", {2, [](Numbers n) -> c10::IValue { return compare(n, std::equal_to()); }}},
      {"_operator.ne", {2, [](Numbers n) -> c10::IValue { return compare(n, std::not_equal_to()); }}},
      {"_operator.lt", {2, [](Numbers n) -> c10::IValue { return compare(n, std::less()); }}},
      {"_operator.le", {2, [](Numbers n) -> c10::IValue { return compare(n, std::less_equal()); }}},
      {"_operator.gt", {2, [](Numbers n) -> c10::IValue { return compare(n, std::greater()); }}},
      {"_operator.ge", {2, [](Numbers n) -> c10::IValue { return compare(n, std::greater_equal()); }}},
      {"_operator.and_", {2, [](Numbers n) { return bits(n, std::bit_and()); }}},
      {"_operator.or_", {2, [](Numbers n) { return bits(n, std::bit_or()); }}},
      {"_operator.lshift", {2, [](Numbers n) { return product(n[0], shift(n)); }}},
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

/// `prefixes` are separated by spaces.
bool begins_with_one_of(std::string_view name, std::string_view prefixes) {
  return std::ranges::any_of(prefixes | std::views::split(' '), [&](const auto& prefix) {
    return name.starts_with(std::string_view(prefix.begin(), prefix.end()));
  });
}

/// How the names of operators begin that replace a tensor's memory, read a file, take memory that is packed for a
/// kernel, or leave checks to their callers.
constexpr std::string_view refused =
    "set_ resize from_file fbgemm_ quantized_ mkldnn_ cudnn_ miopen_ sparse_ to_padded nested_ batch_norm_ "
    "segment_reduce";
/// Torch's internal operators, whose names begin with "_", may leave checks to their callers. Only those whose names
/// begin like this are allowed, since exported programs have them. find_check() adds the checks that they lack.
constexpr std::string_view allowed =
    "__ _adaptive_avg_pool _assert_ _batch_norm_ _cdist_ _conj _convolution _embedding_bag _fft_ _fused_rms_norm "
    "_linalg_ "
    "_local_scalar_dense _log_softmax _native_batch_norm_legit _neg_view _pdist_ _prelu_kernel _safe_softmax _softmax "
    "_to_copy _trilinear _unsafe_index _unsafe_view _upsample_ _weight_norm";

/// Checks that the statistics and weights of a batch-norm have one value for each channel. Of torch's operators, only
/// batch_norm() checks this itself.
void check_channels(Numbers arguments) {
  const auto channels = arguments[0].toTensor().size(1);
  for (const auto& argument : arguments.slice(1, std::min<std::size_t>(4, arguments.size() - 1)))
    TORCH_CHECK(!argument.isTensor() || argument.toTensor().numel() == channels, "there are ", channels,
                " channels, and other statistics or weights");
}

void check_norms(Numbers arguments) {
  const auto &v = arguments[0].toTensor(), &g = arguments[1].toTensor();
  const auto dim = arguments[2].toInt();
  TORCH_CHECK(v.dim() > 0 && (dim < 0 || g.numel() == v.size(dim)), "the norms do not fit the weight");
}

/// Checks all targets of ctc_loss(), with their padding, since torch checks none of them.
void check_targets(Numbers arguments) {
  const auto classes = arguments[0].toTensor().size(-1);
  const auto& targets = arguments[1].toTensor();
  TORCH_CHECK(!targets.lt(0).logical_or(targets.ge(classes)).any().item<bool>(), "a target is none of the ", classes,
              " classes");
}

std::string_view name_of(const c10::FunctionSchema& schema) {
  return std::string_view(schema.name()).substr(schema.name().find("::") + 2);
}

}  // namespace

Arithmetic find_arithmetic(const std::string& target, std::size_t operands) {
  const auto at = table().find(target);
  return at == table().end() || at->second.count != operands ? nullptr : at->second.function;
}

Check find_check(const c10::FunctionSchema& schema) {
  const auto name = name_of(schema);
  if (name.starts_with("_batch_norm_") || name.find("native_batch_norm") != name.npos) return check_channels;
  if (name.starts_with("_weight_norm")) return check_norms;
  return name == "ctc_loss" ? check_targets : nullptr;
}

bool is_allowed(const c10::FunctionSchema& schema) {
  const auto name = name_of(schema);
  if (begins_with_one_of(name, refused) || name.find("backward") != name.npos) return false;
  if (name.starts_with('_') && !begins_with_one_of(name, allowed)) return false;
  return std::ranges::none_of(schema.arguments(), [](const c10::Argument& argument) {
    const auto kind = argument.type()->kind();
    return kind == c10::TypeKind::StorageType || kind == c10::TypeKind::StreamObjType;
  });
}

}  // namespace muster::detail::weights::exported
