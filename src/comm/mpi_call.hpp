// MPI's C calls, checked in one place; its names of our types, and our reductions as operations of MPI.
#pragma once

#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <mpi.h>

#include <vector>

namespace muster::detail::comm {

/// Throws what `code` means (ExitCode::retry).
[[noreturn]] void fail(int code, const char* call);

inline void check(int code, const char* call) {
  if (code != MPI_SUCCESS) fail(code, call);
}

/// This rank in `comm`, and how many there are.
int rank_in(MPI_Comm comm);
int size_in(MPI_Comm comm);
/// All of its ranks: 0, 1, ….
std::vector<int> ranks_in(MPI_Comm comm);

/// A duplicate with MPI_ERRORS_RETURN. Collective.
MPI_Comm duplicate(MPI_Comm comm);

MPI_Datatype mpi_type(node::Dtype type);

/// The operation for that type, which reduces as the ranks of a node do (node/kernels.hpp): the same bits, whoever
/// carries it. An Error where there is none (bit operations on floating-point numbers, order on complex ones).
MPI_Op mpi_op(ReduceOp op, node::Dtype type);

}  // namespace muster::detail::comm
