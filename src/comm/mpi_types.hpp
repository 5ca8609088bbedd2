// MPI's names of our types, and our reductions as operations of MPI.
#pragma once

#include "comm/collectives.hpp"

#include <mpi.h>

namespace muster::detail::comm {

MPI_Datatype mpi_type(Dtype type);

/// The operation for that type, which reduces as the ranks of a node do (node/kernels.hpp): the same bits, whoever
/// carries it. An Error where there is none (bit operations on floating-point numbers, order on complex ones).
MPI_Op mpi_op(ReduceOp op, Dtype type);

}  // namespace muster::detail::comm
