#include "group/reduction.hpp"

#include "base/text.hpp"
#include "group/buffer.hpp"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <utility>

namespace muster::detail::group {
namespace {

at::Scalar factor_of(const c10d::ReduceOp& op, std::string_view doing) {
  // Of the names of this class, only NCCLPreMulSumSupplement exists in both older and newer releases of torch.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr)
    throw Error(ExitCode::usage, doing, "PREMUL_SUM came without its factor", "Make the operation with makePreMulSum");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item() : at::Scalar(supplement->double_factor);
}

}  // namespace

Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type, std::string_view doing) {
  const auto dtype = dtype_of(type);
  const std::string name = c10::toString(type);
  if (!dtype)
    throw Error(ExitCode::usage, doing, "there is no reduction of " + name, "Convert the tensor to a wider type");
  constexpr std::pair<c10d::ReduceOp::RedOpType, ReduceOp> plain[] = {
      {c10d::ReduceOp::SUM, ReduceOp::sum},      {c10d::ReduceOp::PRODUCT, ReduceOp::product},
      {c10d::ReduceOp::MIN, ReduceOp::min},      {c10d::ReduceOp::MAX, ReduceOp::max},
      {c10d::ReduceOp::BAND, ReduceOp::bit_and}, {c10d::ReduceOp::BOR, ReduceOp::bit_or},
      {c10d::ReduceOp::BXOR, ReduceOp::bit_xor}};
  for (const auto& [theirs, ours] : plain)
    if (op.op_ == theirs) {
      comm::require_reducible(*dtype, ours, doing);
      return {ours};
    }
  const bool fractional = at::isFloatingType(type) || at::isComplexType(type);
  switch (op.op_) {
    case c10d::ReduceOp::AVG:
      if (!fractional)
        throw Error(ExitCode::usage, doing, "the average of " + name + " is not a " + name,
                    "Use SUM and divide, or convert to floating point");
      return {.op = ReduceOp::sum, .average = true};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto factor = factor_of(op, doing);
      if (!fractional || (factor.isComplex() && !at::isComplexType(type)))
        throw Error(ExitCode::usage, doing, "PREMUL_SUM of " + name + " would lose its factor",
                    "Multiply yourself and use SUM, or convert the tensor");
      return {.op = ReduceOp::sum, .factor = factor};
    }
    default:
      throw Error(ExitCode::usage, doing, str("unknown reduction ", op.op_), "Use one of c10d::ReduceOp");
  }
}

}  // namespace muster::detail::group
