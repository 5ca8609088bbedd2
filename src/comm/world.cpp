#include "comm/world.hpp"

#include "comm/mpi_threads.hpp"
#include "muster/error.hpp"

#include <unistd.h>

namespace muster::detail::comm {

void throw_outer_cause(const World& world) { throw remote_cause(world.outer->outcomes, world.placement.hosts); }

void require_in_use(const World& world) {
  if (mpi_is_finalised())
    throw Error(ExitCode::usage, "calling the other ranks", "MPI is finalised already",
                "Do everything with other ranks before MPI_Finalize");
  if (world.use == World::Use::open) return;
  while (world.use == World::Use::left_behind) ::pause();
  throw Error(ExitCode::retry, "calling the other ranks", "this rank has given up the work that they did together",
              "The warning before this says why");
}

}  // namespace muster::detail::comm
