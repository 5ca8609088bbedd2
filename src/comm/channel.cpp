#include "comm/channel.hpp"

#include "comm/handshake.hpp"

#include <algorithm>
#include <map>
#include <new>

namespace muster::detail::comm {
namespace {

/// What rank `rank` of a communicator sees, whose ranks are those `ranks` of the placement.
Topology make_topology(const Placement& placement, const std::vector<int>& ranks, int rank) {
  Topology topology;
  topology.local_size = 0;
  std::map<int, int> number;
  for (const int r : ranks) {
    const int node = placement.node_of_rank[static_cast<std::size_t>(r)];
    topology.node_of_rank.push_back(number.try_emplace(node, static_cast<int>(number.size())).first->second);
    topology.hosts.push_back(placement.hosts[static_cast<std::size_t>(r)]);
  }
  topology.num_nodes = static_cast<int>(number.size());
  topology.node_rank = topology.node_of_rank[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (topology.node_of_rank[r] != topology.node_rank) continue;
    ++topology.local_size;
    if (static_cast<int>(r) < rank) ++topology.local_rank;
  }
  return topology;
}

/// Memory of a communicator of one rank, aligned to a page, zeroes.
std::shared_ptr<std::byte> own_memory(std::size_t bytes) {
  const auto page = static_cast<std::align_val_t>(node::page_size());
  return {new (page) std::byte[bytes](), [page](std::byte* data) { ::operator delete[](data, page); }};
}

/// Null where ranks of a node cannot share memory. Collective over `comm`.
std::unique_ptr<Hierarchy> make_hierarchy(MPI_Comm comm, const Topology& topology) {
  const auto size = topology.node_of_rank.size();
  if (size == 1) return nullptr;
  auto made = std::make_unique<Hierarchy>();
  auto& ranks = made->leaders_of_node;
  ranks.resize(static_cast<std::size_t>(topology.num_nodes));
  for (std::size_t r = 0; r < size; ++r)
    ranks[static_cast<std::size_t>(topology.node_of_rank[r])].push_back(static_cast<int>(r));
  made->ranks = ranks[static_cast<std::size_t>(topology.node_rank)];
  const auto least = std::ranges::min(ranks, {}, &std::vector<int>::size).size();
  made->leaders = static_cast<int>(least);
  for (auto& leaders : ranks) leaders.resize(least);

  const auto bytes = node::Communicator::memory(topology.local_size);
  std::byte* memory = nullptr;
  if (topology.num_nodes == static_cast<int>(size)) {
    // A communicator of this rank alone takes part in what goes between nodes.
    const auto own = own_memory(bytes);
    memory = own.get();
    made->memory = own;
  } else {
    const auto segment = map_together(comm, made->ranks, bytes, 0, topology.local_rank == 0 ? bytes : 0);
    if (!segment) return nullptr;
    memory = segment->data();
    made->memory = segment;
  }
  made->communicator = std::make_unique<node::Communicator>(memory, topology.local_rank, topology.local_size);
  return made;
}

}  // namespace

Channel::Channel(MPI_Comm own, std::shared_ptr<World> the_world, std::vector<int> ranks)
    : world(std::move(the_world)),
      world_ranks(std::move(ranks)),
      rank(rank_in(own)),
      size(size_in(own)),
      topology(make_topology(world->placement, world_ranks, rank)),
      collective(own),
      point_to_point(duplicate(own)),
      hierarchy(make_hierarchy(own, topology)) {}

void Channel::renew() {
  Channel fresh(duplicate(world->agreement), world, world_ranks);
  collective = fresh.collective;
  point_to_point = fresh.point_to_point;
  hierarchy.swap(fresh.hierarchy);
  // The old one stays as it is: MPI may still write to memory that the node's communicator knows.
  static_cast<void>(fresh.hierarchy.release());
}

void Channel::wait(const std::function<bool()>& ready, const std::function<std::string()>& doing,
                   std::optional<std::chrono::milliseconds> limit) {
  const auto longest = limit.value_or(world->limit);
  const auto advanced = [&] {
    advance_over_nodes(*this);
    return ready();
  };
  if (!wait_until(advanced, longest, [&] { world->alarm.listen(); }))
    throw Error(ExitCode::retry, doing(),
                "not finished within " + std::to_string(longest.count() / 1000.0).substr(0, 6) + " s on rank " +
                    std::to_string(rank) + " of " + std::to_string(size),
                "A rank is stuck, lost or in another collective; --timeout sets the limit");
}

void wait_on(const Communicator& communicator, const std::function<bool()>& ready,
             const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> limit) {
  Channel::of(communicator)->wait(ready, doing, limit);
}

}  // namespace muster::detail::comm
