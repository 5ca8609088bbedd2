#include "comm/mpi_types.hpp"

#include "comm/mpi_call.hpp"
#include "node/kernels.hpp"

#include <array>
#include <cstddef>
#include <span>
#include <utility>

namespace muster::detail::comm {
namespace {

constexpr std::size_t num_types = static_cast<std::size_t>(Dtype::boolean) + 1;

template <Dtype type, ReduceOp op>
void reduce(void* in, void* in_out, int* length, MPI_Datatype*) {
  const std::array<const void*, 2> sources{in, in_out};
  node::reduce_arrays(std::span(&in_out, 1), sources, static_cast<std::size_t>(*length), {.type = type, .op = op});
}

/// [types][operations]; kept to the end of the process, like MPI's own.
template <std::size_t... i>
std::array<MPI_Op, sizeof...(i)> make_ops(std::index_sequence<i...>) {
  std::array<MPI_Op, sizeof...(i)> ops;
  const auto make = [](MPI_User_function* function) {
    MPI_Op op = MPI_OP_NULL;
    check(MPI_Op_create(function, 1, &op), "MPI_Op_create");
    return op;
  };
  ((ops[i] = make(&reduce<Dtype{i / node::num_reduce_ops}, ReduceOp{i % node::num_reduce_ops}>)), ...);
  return ops;
}

}  // namespace

MPI_Datatype mpi_type(Dtype type) {
  // In the order of Dtype. MPI knows no halves; it carries their bits.
  const std::array<MPI_Datatype, 12> names{MPI_UINT8_T, MPI_INT8_T,          MPI_INT16_T,          MPI_INT32_T,
                                           MPI_INT64_T, MPI_UINT16_T,        MPI_UINT16_T,         MPI_FLOAT,
                                           MPI_DOUBLE,  MPI_C_FLOAT_COMPLEX, MPI_C_DOUBLE_COMPLEX, MPI_C_BOOL};
  static_assert(num_types == std::tuple_size_v<decltype(names)>);
  return names[static_cast<std::size_t>(type)];
}

MPI_Op mpi_op(ReduceOp op, Dtype type) {
  if (!node::reducible(type, op)) {
    if (op == ReduceOp::min || op == ReduceOp::max)
      throw Error(ExitCode::usage, "starting a reduction", "complex numbers have no order", "Use sum or product");
    throw Error(ExitCode::usage, "starting a reduction", "bit operations are for integers and booleans",
                "Use sum, product, min or max");
  }
  static const auto ops = make_ops(std::make_index_sequence<num_types * node::num_reduce_ops>());
  return ops[static_cast<std::size_t>(type) * node::num_reduce_ops + static_cast<std::size_t>(op)];
}

}  // namespace muster::detail::comm
