// MPI's C calls, checked in one place.
#pragma once

#include <mpi.h>

namespace muster::detail::comm {

/// Throws what `code` means (ExitCode::retry).
[[noreturn]] void fail(int code, const char* call);

inline void check(int code, const char* call) {
  if (code != MPI_SUCCESS) fail(code, call);
}

/// This rank in `comm`, and how many there are.
int rank_in(MPI_Comm comm);
int size_in(MPI_Comm comm);

/// A duplicate with MPI_ERRORS_RETURN. Collective.
MPI_Comm duplicate(MPI_Comm comm);

}  // namespace muster::detail::comm
