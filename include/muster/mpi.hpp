// For those who bring an MPI communicator of their own. The one public header that needs MPI.
#pragma once

#include <muster/communicator.hpp>

#include <mpi.h>

namespace muster {

/// A communicator over a duplicate of `comm`, which stays the caller's. MPI must be initialised and outlive it; below
/// MPI_THREAD_SERIALIZED its main thread calls (else an Error, ExitCode::usage), here and in all that is done with the
/// communicator. Collective over `comm`; an Error (ExitCode::retry) where ranks of it do not come within half an hour.
///
/// Any number of launches may follow one another: they use the same MPI communicators again, about 20 for a launch that
/// trains, which stay until MPI ends.
///
///   MPI_Comm_split(MPI_COMM_WORLD, rank < size / 2, rank, &half);   // a simulation, which trains on half of its ranks
///   if (rank < size / 2) {
///     muster::Launch launch(argc, argv, muster::from_mpi(half));    // the others go on computing
///     const int code = launch.run([&] { return muster::TorchTrainer(launch, train, {…}).fit(); });
///   }
Communicator from_mpi(MPI_Comm comm);

}  // namespace muster
