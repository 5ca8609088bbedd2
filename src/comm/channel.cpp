#include "comm/channel.hpp"

#include "comm/mpi_call.hpp"
#include "comm/shared_memory.hpp"
#include "comm/wait.hpp"
#include "muster/mpi.hpp"

#include <sched.h>

#include <array>
#include <numeric>
#include <utility>

namespace muster::detail::comm {

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

Channel::Channel(MPI_Comm collective_comm, MPI_Comm point_to_point_comm, std::shared_ptr<World> the_world,
                 std::vector<int> ranks)
    : collective(collective_comm),
      point_to_point(point_to_point_comm),
      world(std::move(the_world)),
      world_ranks(std::move(ranks)) {
  check(MPI_Comm_rank(collective, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(collective, &size), "MPI_Comm_size");
  topology = make_topology(world->placement, world_ranks, rank);
}

Communicator open(std::shared_ptr<Channel> channel) {
  Communicator communicator(std::move(channel));
  attach_node(communicator);
  return communicator;
}

void renew(const Communicator& world) {
  auto& channel = *world.channel();
  // The old ones stay as they are: MPI may still write to memory that the node's communicator knows.
  static_cast<void>(channel.node.release());
  channel.collective = duplicate(channel.world->agreement);
  channel.point_to_point = duplicate(channel.world->agreement);
  attach_node(world);
}

namespace {

/// What a rank does for its node, whose ranks `node` has.
void look_around(MPI_Comm node) {
  int rank = 0, size = 1;
  check(MPI_Comm_rank(node, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(node, &size), "MPI_Comm_size");
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const bool known = ::sched_getaffinity(0, sizeof cpus, &cpus) == 0;  // not with more CPUs than the set holds
  check(MPI_Allreduce(MPI_IN_PLACE, &cpus, sizeof cpus, MPI_BYTE, MPI_BOR, node), "MPI_Allreduce");
  set_cores_suffice(!known || CPU_COUNT(&cpus) >= size);
  if (rank == 0) node::SharedSegment::remove_leftovers();
}

/// As MPI says. Collective.
Placement find_placement(MPI_Comm comm) {
  int lowest = 0, size = 1;  // the lowest rank of a node stands for it
  check(MPI_Comm_rank(comm, &lowest), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
  check(MPI_Bcast(&lowest, 1, MPI_INT, 0, node), "MPI_Bcast");
  look_around(node);
  check(MPI_Comm_free(&node), "MPI_Comm_free");

  using Host = std::array<char, MPI_MAX_PROCESSOR_NAME>;
  Host host{};
  int length = 0;
  check(MPI_Get_processor_name(host.data(), &length), "MPI_Get_processor_name");
  Placement placement;
  placement.node_of_rank.resize(static_cast<std::size_t>(size));
  std::vector<Host> hosts(static_cast<std::size_t>(size));
  check(MPI_Allgather(&lowest, 1, MPI_INT, placement.node_of_rank.data(), 1, MPI_INT, comm), "MPI_Allgather");
  check(MPI_Allgather(&host, sizeof host, MPI_CHAR, hosts.data(), sizeof host, MPI_CHAR, comm), "MPI_Allgather");
  for (const auto& name : hosts) placement.hosts.emplace_back(name.data());
  return placement;
}

/// Over `collective`, a duplicate that nobody else uses.
Communicator make_world(MPI_Comm collective, Placement placement) {
  std::vector<int> ranks(placement.node_of_rank.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  auto world = std::make_shared<World>(duplicate(collective), duplicate(collective), std::move(placement));
  return open(std::make_shared<Channel>(collective, duplicate(collective), std::move(world), std::move(ranks)));
}

}  // namespace

Communicator make_world(const Communicator& ranks, Placement placement) {
  return make_world(duplicate(ranks.channel()->collective), std::move(placement));
}

Communicator make_world(MPI_Comm comm) {
  const MPI_Comm collective = duplicate(comm);
  return make_world(collective, find_placement(collective));
}

}  // namespace muster::detail::comm

namespace muster {

Communicator from_mpi(MPI_Comm comm) {
  // Nothing wakes the calls that follow, so they begin when all ranks have come.
  MPI_Request request = MPI_REQUEST_NULL;
  detail::comm::check(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  const auto all_came = [&] {
    int flag = 0;
    detail::comm::check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    return flag != 0;
  };
  if (!detail::comm::wait_until(all_came, detail::comm::default_limit))
    throw Error(ExitCode::retry, "taking up an MPI communicator",
                "not all of its ranks came within " + std::to_string(detail::comm::default_limit.count() / 1000) + " s",
                "A rank is stuck, lost or in another collective");
  return detail::comm::make_world(comm);
}

}  // namespace muster
