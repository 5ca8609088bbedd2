#include "comm/channel.hpp"

#include "comm/handshake.hpp"
#include "comm/hierarchy.hpp"

#include <algorithm>
#include <new>

namespace muster::detail::comm {
namespace {

/// Memory of a communicator of one rank, aligned to a page, zeroes.
std::shared_ptr<std::byte> own_memory(std::size_t bytes) {
  const auto page = static_cast<std::align_val_t>(node::page_size());
  return {new (page) std::byte[bytes](), [page](std::byte* data) { ::operator delete[](data, page); }};
}

/// Null where ranks of a node cannot share memory. Collective over `comm`.
std::unique_ptr<Node> make_node(MPI_Comm comm, const Topology& topology) {
  const auto size = topology.node_of_rank.size();
  if (size == 1) return nullptr;
  auto node = std::make_unique<Node>();
  auto& ranks = node->owners_of_node;
  ranks.resize(static_cast<std::size_t>(topology.num_nodes));
  for (std::size_t r = 0; r < size; ++r)
    ranks[static_cast<std::size_t>(topology.node_of_rank[r])].push_back(static_cast<int>(r));
  node->ranks = ranks[static_cast<std::size_t>(topology.node_rank)];
  const auto least = std::ranges::min(ranks, {}, &std::vector<int>::size).size();
  node->owners = static_cast<int>(least);
  for (auto& owners : ranks) owners.resize(least);

  const auto bytes = node::Communicator::memory(topology.local_size);
  std::byte* memory = nullptr;
  if (topology.num_nodes == static_cast<int>(size)) {
    // A communicator of this rank alone takes part in what goes between nodes.
    const auto own = own_memory(bytes);
    memory = own.get();
    node->memory = own;
  } else {
    const auto segment = map_together(comm, node->ranks, bytes, 0, topology.local_rank == 0 ? bytes : 0);
    if (!segment) return nullptr;
    memory = segment->data();
    node->memory = segment;
  }
  node->communicator = std::make_unique<node::Communicator>(memory, topology.local_rank, topology.local_size);
  return node;
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
      node(make_node(own, topology)) {}

void Channel::renew() {
  Channel fresh(duplicate(world->agreement), world, world_ranks);
  collective = fresh.collective;
  point_to_point = fresh.point_to_point;
  node.swap(fresh.node);
  // The old one stays as it is: MPI may still write to memory that the node's communicator knows.
  static_cast<void>(fresh.node.release());
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
