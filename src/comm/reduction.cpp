#include "comm/reduction.hpp"

#include "comm/mpi_call.hpp"
#include "node/kernels.hpp"

#include <array>
#include <cstddef>
#include <span>

namespace muster::detail::comm {
namespace {

template <Dtype type, ReduceOp op>
void reduce_halves(void* in, void* in_out, int* length, MPI_Datatype*) {
  const std::array<const void*, 2> sources{in, in_out};
  node::reduce_arrays(std::span(&in_out, 1), sources, static_cast<std::size_t>(*length), {.type = type, .op = op});
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

}  // namespace muster::detail::comm
