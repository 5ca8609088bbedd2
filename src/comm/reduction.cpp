#include "comm/reduction.hpp"

#include "comm/mpi_call.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace muster::comm {
namespace {

float widen(std::uint16_t bits, std::integral_constant<Dtype, Dtype::bf16>) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t narrow(float value, std::integral_constant<Dtype, Dtype::bf16>) {
  if (std::isnan(value)) return 0x7fc0;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Round to nearest, ties to even.
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float widen(std::uint16_t bits, std::integral_constant<Dtype, Dtype::f16>) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

std::uint16_t narrow(float value, std::integral_constant<Dtype, Dtype::f16>) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

float combine(float a, float b, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return a + b;
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return std::isnan(a) || a < b ? a : b;
    default:
      return std::isnan(a) || a > b ? a : b;
  }
}

template <Dtype type, ReduceOp op>
void reduce_halves(void* in, void* in_out, int* length, MPI_Datatype*) {
  constexpr std::integral_constant<Dtype, type> tag;
  const auto* a = static_cast<const std::uint16_t*>(in);
  auto* b = static_cast<std::uint16_t*>(in_out);
  for (int i = 0; i < *length; ++i) b[i] = narrow(combine(widen(a[i], tag), widen(b[i], tag), op), tag);
}

template <Dtype type, ReduceOp op>
MPI_Op half_op() {
  // Made once and kept to the end of the process, like the predefined ones.
  static const MPI_Op made = [] {
    MPI_Op value = MPI_OP_NULL;
    check(MPI_Op_create(&reduce_halves<type, op>, 1, &value), "MPI_Op_create");
    return value;
  }();
  return made;
}

template <Dtype type>
MPI_Op half_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return half_op<type, ReduceOp::sum>();
    case ReduceOp::product:
      return half_op<type, ReduceOp::product>();
    case ReduceOp::min:
      return half_op<type, ReduceOp::min>();
    case ReduceOp::max:
      return half_op<type, ReduceOp::max>();
    default:
      return MPI_OP_NULL;
  }
}

bool is_floating(Dtype type) {
  return type == Dtype::f16 || type == Dtype::bf16 || type == Dtype::f32 || type == Dtype::f64;
}
bool is_complex(Dtype type) { return type == Dtype::c64 || type == Dtype::c128; }

MPI_Op boolean_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bit_or:
      return MPI_LOR;
    case ReduceOp::bit_xor:
      return MPI_LXOR;
    default:
      return MPI_LAND;
  }
}

MPI_Op native_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return MPI_SUM;
    case ReduceOp::product:
      return MPI_PROD;
    case ReduceOp::min:
      return MPI_MIN;
    case ReduceOp::max:
      return MPI_MAX;
    case ReduceOp::bit_and:
      return MPI_BAND;
    case ReduceOp::bit_or:
      return MPI_BOR;
    default:
      return MPI_BXOR;
  }
}

}  // namespace

MPI_Datatype mpi_type(Dtype type) {
  switch (type) {
    case Dtype::u8:
      return MPI_UINT8_T;
    case Dtype::i8:
      return MPI_INT8_T;
    case Dtype::i16:
      return MPI_INT16_T;
    case Dtype::i32:
      return MPI_INT32_T;
    case Dtype::i64:
      return MPI_INT64_T;
    case Dtype::f16:
    case Dtype::bf16:
      return MPI_UINT16_T;
    case Dtype::f32:
      return MPI_FLOAT;
    case Dtype::f64:
      return MPI_DOUBLE;
    case Dtype::c64:
      return MPI_C_FLOAT_COMPLEX;
    case Dtype::c128:
      return MPI_C_DOUBLE_COMPLEX;
    case Dtype::boolean:
      return MPI_C_BOOL;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op mpi_op(ReduceOp op, Dtype type) {
  const bool bits = op == ReduceOp::bit_and || op == ReduceOp::bit_or || op == ReduceOp::bit_xor;
  const bool order = op == ReduceOp::min || op == ReduceOp::max;
  if (bits && (is_floating(type) || is_complex(type)))
    throw Error(ExitCode::usage, "starting a reduction", "bit operations are for integers and booleans",
                "Use sum, product, min or max");
  if (order && is_complex(type))
    throw Error(ExitCode::usage, "starting a reduction", "complex numbers have no order", "Use sum or product");
  if (type == Dtype::boolean) return boolean_op(op);
  if (type == Dtype::f16) return half_op<Dtype::f16>(op);
  if (type == Dtype::bf16) return half_op<Dtype::bf16>(op);
  return native_op(op);
}

}  // namespace muster::comm
