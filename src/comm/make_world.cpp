#include "comm/make_world.hpp"

#include "comm/channel.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/rendezvous.hpp"
#include "comm/timeout.hpp"
#include "muster/error.hpp"
#include "muster/mpi.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace muster {
namespace detail::comm {
namespace {

/// The ranks of `comm` as MPI_COMM_WORLD numbers them; MPI_UNDEFINED for a rank outside of MPI_COMM_WORLD. Local.
std::vector<int> world_ranks_of(MPI_Comm comm) {
  const auto ranks = ranks_in(comm);
  std::vector<int> world_ranks(ranks.size());
  MPI_Group own = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &own), "MPI_Comm_group");
  check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check(MPI_Group_translate_ranks(own, static_cast<int>(ranks.size()), ranks.data(), all, world_ranks.data()),
        "MPI_Group_translate_ranks");
  check(MPI_Group_free(&own), "MPI_Group_free");
  check(MPI_Group_free(&all), "MPI_Group_free");
  return world_ranks;
}

/// The pool of the ranks of MPI_COMM_WORLD. It is never destroyed: its communicators live as long as MPI.
const std::shared_ptr<Pool>& pool_of_mpi() {
  static const auto& pool = *new std::shared_ptr<Pool>(new Pool);
  return pool;
}

/// Makes a world of all ranks of `over`; `members` are their numbers in the pool. Collective.
Communicator make_world(const std::shared_ptr<Pool>& pool, const std::vector<int>& members, MpiCommunicator& over,
                        Placement placement) {
  constexpr auto doing = "making a world";
  const auto ranks = ranks_in(over.comm);
  auto for_world = pool->take(3, members, over, ranks, doing), for_channel = pool->take(2, members, over, ranks, doing);
  const auto world = std::make_shared<World>(pool, members, std::move(for_world), std::move(placement));
  return Channel::open(std::move(for_channel), world, ranks);
}

}  // namespace

Communicator make_world(const Communicator& ranks, Placement placement) {
  const auto& channel = *Channel::of(ranks);
  return make_world(channel.world->pool, channel.members(channel.all_ranks()), *channel.transport->collective,
                    std::move(placement));
}

Communicator make_separate_world(const Communicator& ranks) {
  wait_for_all_ranks(ranks, "making a separate world");
  const auto apart = make_world(ranks, {ranks.topology().node_of_rank, ranks.topology().hosts});
  set_timeout(apart, timeout(ranks));
  set_final_grace(apart, final_grace(ranks));
  return apart;
}

}  // namespace detail::comm

Communicator from_mpi(MPI_Comm comm) {
  using namespace detail::comm;
  constexpr auto doing = "taking up an MPI communicator";
  require_mpi(doing);
  if (comm == MPI_COMM_NULL)
    throw Error(ExitCode::usage, doing, "it is MPI_COMM_NULL",
                "Make the call on the ranks that MPI_Comm_split has given a communicator");
  int is_intercommunicator = 0;
  check(MPI_Comm_test_inter(comm, &is_intercommunicator), "MPI_Comm_test_inter");
  if (is_intercommunicator != 0)
    throw Error(ExitCode::usage, doing, "it is an intercommunicator", "Join its two groups by MPI_Intercomm_merge");
  auto members = world_ranks_of(comm);
  auto pool = pool_of_mpi();
  // Ranks of another MPI_COMM_WORLD, for example after MPI_Comm_spawn, have no numbers in that pool.
  if (std::ranges::count(members, MPI_UNDEFINED) > 0) {
    members = ranks_in(comm);
    pool = std::make_shared<Pool>();
  }
  MpiCommunicator given(comm, members, 0);  // belongs to the caller, so it is not in the pool
  // Later calls, such as MPI_Comm_create_group(), have no timeout, so all ranks must have come before.
  Handshake(given, doing).all_true(true);
  return make_world(pool, members, given, find_placement(given));
}

}  // namespace muster
