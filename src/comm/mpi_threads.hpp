// When, and on which threads, this process may call MPI.
#pragma once

#include "base/export.hpp"

namespace muster::detail::comm {

/// Throws an Error (ExitCode::usage), whose text begins with `doing`, unless MPI is initialised, not finalised, and may
/// be called by this thread. Local.
void require_mpi(const char* doing);

/// True from MPI_Init on, also after MPI_Finalize.
MUSTER_INTERNAL_API bool mpi_is_initialised() noexcept;

/// True from MPI_Finalize on.
MUSTER_INTERNAL_API bool mpi_is_finalised() noexcept;

/// Makes MPI_Finalize() call `call` at its beginning, when MPI can still be used.
MUSTER_INTERNAL_API void call_before_finalize(void (*call)());

/// True if several threads may call MPI at once (MPI_THREAD_MULTIPLE).
MUSTER_INTERNAL_API bool threads_may_call_mpi() noexcept;

}  // namespace muster::detail::comm
