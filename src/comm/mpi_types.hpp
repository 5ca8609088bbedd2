// MPI's names of our types and operations, and the reductions that MPI lacks.
#pragma once

#include "comm/collectives.hpp"

#include <mpi.h>

namespace muster::detail::comm {

MPI_Datatype mpi_type(Dtype type);

/// The operation for that type; half and bfloat16 are reduced in float. An Error where there is none (bit operations
/// on floating-point numbers, order on complex ones).
MPI_Op mpi_op(ReduceOp op, Dtype type);

}  // namespace muster::detail::comm
