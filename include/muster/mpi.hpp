// For those who bring an MPI communicator of their own. The one public header that needs MPI.
#pragma once

#include <muster/communicator.hpp>

#include <mpi.h>

namespace muster {

/// A communicator over a duplicate of `comm`, which stays the caller's. MPI must be initialised and outlive it.
/// Collective over `comm`; an Error (ExitCode::retry) where ranks of it do not come within half an hour.
Communicator from_mpi(MPI_Comm comm);

}  // namespace muster
