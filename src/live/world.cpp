#include "comm/mpi_scope.hpp"
#include "launch/malloc.hpp"
#include "live/sender/ring.h"
#include "muster/error.hpp"
#include "muster/live.hpp"
#include "muster/mpi.hpp"

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
  const auto [own, size] = detail::comm::rank_and_size();
  bool on_one_node = true;
  for (int rank = 0; rank < size; ++rank) on_one_node = on_one_node && live_share_node(own, rank) != 0;
  state_->communicator.reset();
  MPI_Comm_free(&state_->part);
  if (state_->owns_mpi) detail::comm::finalise_mpi(on_one_node);
}

const Communicator& LiveWorld::part() const noexcept { return *state_->communicator; }

}  // namespace muster
