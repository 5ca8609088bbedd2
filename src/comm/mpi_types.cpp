#include "comm/mpi_types.hpp"

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
  if (op == ReduceOp::sum) return half_op<type, ReduceOp::sum>();
  if (op == ReduceOp::product) return half_op<type, ReduceOp::product>();
  return op == ReduceOp::min ? half_op<type, ReduceOp::min>() : half_op<type, ReduceOp::max>();
}

bool is_floating(Dtype type) {
  return type == Dtype::f16 || type == Dtype::bf16 || type == Dtype::f32 || type == Dtype::f64;
}
bool is_complex(Dtype type) { return type == Dtype::c64 || type == Dtype::c128; }

/// In the order of ReduceOp: sum, product, min, max, and, or, exclusive or. Of booleans a sum is or, a product and.
MPI_Op named(ReduceOp op, bool boolean) {
  const std::array<MPI_Op, 7> numbers{MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX, MPI_BAND, MPI_BOR, MPI_BXOR};
  const std::array<MPI_Op, 7> booleans{MPI_LOR, MPI_LAND, MPI_LAND, MPI_LOR, MPI_LAND, MPI_LOR, MPI_LXOR};
  return (boolean ? booleans : numbers).at(static_cast<std::size_t>(op));
}

}  // namespace

MPI_Datatype mpi_type(Dtype type) {
  // In the order of Dtype. MPI knows no halves; it carries their bits.
  const std::array<MPI_Datatype, 12> names{MPI_UINT8_T, MPI_INT8_T,          MPI_INT16_T,          MPI_INT32_T,
                                           MPI_INT64_T, MPI_UINT16_T,        MPI_UINT16_T,         MPI_FLOAT,
                                           MPI_DOUBLE,  MPI_C_FLOAT_COMPLEX, MPI_C_DOUBLE_COMPLEX, MPI_C_BOOL};
  static_assert(static_cast<std::size_t>(Dtype::boolean) + 1 == std::tuple_size_v<decltype(names)>);
  return names[static_cast<std::size_t>(type)];
}

MPI_Op mpi_op(ReduceOp op, Dtype type) {
  const bool bits = op == ReduceOp::bit_and || op == ReduceOp::bit_or || op == ReduceOp::bit_xor;
  const bool order = op == ReduceOp::min || op == ReduceOp::max;
  if (bits && (is_floating(type) || is_complex(type)))
    throw Error(ExitCode::usage, "starting a reduction", "bit operations are for integers and booleans",
                "Use sum, product, min or max");
  if (order && is_complex(type))
    throw Error(ExitCode::usage, "starting a reduction", "complex numbers have no order", "Use sum or product");
  if (type == Dtype::f16) return half_op<Dtype::f16>(op);
  if (type == Dtype::bf16) return half_op<Dtype::bf16>(op);
  return named(op, type == Dtype::boolean);
}

}  // namespace muster::detail::comm
