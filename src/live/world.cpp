#include "comm/mpi_scope.hpp"
#include "launch/malloc.hpp"
#include "muster/error.hpp"
#include "muster/live.hpp"
#include "muster/mpi.hpp"
#include "muster_live.h"

#include <mpi.h>

namespace muster {

struct LiveWorld::State {
  bool owns_mpi = false;
  MPI_Comm part = MPI_COMM_NULL;
  std::optional<Communicator> communicator;
};

LiveWorld::LiveWorld() : state_(std::make_unique<State>()) {
  state_->owns_mpi = detail::comm::initialise_mpi();
  if (state_->owns_mpi) detail::launch::prepare_malloc();  // else the program's own part may compute here
  if (muster_live_world(&state_->part) != MUSTER_LIVE_OK)
    throw Error(ExitCode::retry, "finding the programs of the job", "not all ranks of MPI_COMM_WORLD have come in time",
                "Every program of the job calls muster_live_world() or muster_live_open(), or makes a LiveWorld");
  state_->communicator = from_mpi(state_->part);
}

LiveWorld::~LiveWorld() {
  // Of this program's ranks alone: a solver calls MPI_Finalize() itself, and Hydra ends it if this program does not.
  const bool on_one_node = state_->communicator->topology().num_nodes == 1;
  state_->communicator.reset();
  MPI_Comm_free(&state_->part);
  if (state_->owns_mpi) detail::comm::finalise_mpi(on_one_node);
}

const Communicator& LiveWorld::part() const noexcept { return *state_->communicator; }

}  // namespace muster
