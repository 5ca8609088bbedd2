// Communicators from MPI communicators of the program. The only public header that needs MPI.
#pragma once

#include <muster/communicator.hpp>
#include <muster/detail/export.hpp>

#include <mpi.h>

namespace muster {

/// Returns a communicator over a duplicate of `comm`, which remains the caller's. MPI must be initialised, and must not
/// be finalised while the communicator is used. Below MPI_THREAD_SERIALIZED, MPI's main thread must make this call and
/// all calls that use the communicator; otherwise it is an Error (ExitCode::usage). So are MPI_COMM_NULL and an
/// intercommunicator. Collective over `comm`; an Error (ExitCode::retry) if some of its ranks do not make the call
/// within half an hour.
///
/// Any number of launches may follow one another: they reuse the same MPI communicators, about 20 for a launch that
/// trains, which stay until MPI ends.
///
///   MPI_Comm_split(MPI_COMM_WORLD, rank < size / 2, rank, &half);   // a simulation, which trains on half of its ranks
///   if (rank < size / 2) {
///     muster::Launch launch(argc, argv, muster::from_mpi(half));    // the others go on computing
///     const int code = launch.run([&] { return muster::TorchTrainer(launch, train, {…}).fit(); });
///   }
MUSTER_API Communicator from_mpi(MPI_Comm comm);

}  // namespace muster
