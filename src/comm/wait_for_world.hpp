// The first wait of a launch. Some ranks of MPI_COMM_WORLD may run another program, which never makes a launch.
#pragma once

#include <chrono>

namespace muster::detail::comm {

/// Waits until all ranks of MPI_COMM_WORLD have made this call. After 10 s (or `timeout`, if that is less) the ranks
/// that have come ask who else has. If the launcher has started several programs, the job then ends with
/// ExitCode::usage. Otherwise a warning says how many have come, and past `timeout` the job ends with ExitCode::retry.
/// Collective.
void wait_for_world(std::chrono::milliseconds timeout);

/// True if Open MPI's launcher says that it has started several programs as one job: `mpirun -n 1 a : -n 2 b`. Local;
/// for use before MPI is initialised, too.
bool mpirun_has_several_programs() noexcept;

}  // namespace muster::detail::comm
