#include "comm/shared_memory.hpp"

#include "base/log.hpp"
#include "comm/channel.hpp"
#include "comm/collectives.hpp"
#include "comm/mpi_call.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::comm {
namespace {

/// The part of a segment that a rank takes memory for.
struct Part {
  std::size_t first = 0;
  std::size_t bytes = 0;
};

/// Bytes that hold the name of a segment, or what went wrong.
constexpr std::size_t longest = 256;
using Text = std::array<char, longest>;

Text text_of(const std::string& string) {
  Text text{};
  std::copy_n(string.begin(), std::min(string.size(), longest - 1), text.begin());
  return text;
}

/// How the ranks talk while they share out memory: as every collective, so that another rank's error ends it …
struct Woken {
  const Communicator& communicator;

  void from_first(const std::vector<int>& node, Text& text) const {
    auto memory = std::make_shared<Text>(text);
    std::vector<Piece> sends, receives;
    if (communicator.rank() != node.front()) {
      receives.push_back({memory->data(), longest, node.front()});
    } else {
      for (const int r : node)
        if (r != node.front()) sends.push_back({memory->data(), longest, r});
    }
    auto request = Collectives(communicator).exchange(sends, receives, Dtype::u8);
    request.keep(memory);
    request.wait();
    text = *memory;
  }
  bool all(bool mine) const { return communicator.all_reduce(std::int64_t{mine}, ReduceOp::min) == 1; }
  std::vector<std::string> each(const std::string& mine) const { return communicator.all_gather(mine); }
};

/// … or, while a channel is made, as MPI makes communicators: whoever has begun goes through to the end.
struct Unwoken {
  const Channel& channel;

  void from_first(const std::vector<int>& node, Text& text) const {
    if (channel.rank != node.front()) {
      check(MPI_Recv(text.data(), longest, MPI_CHAR, node.front(), 0, channel.collective, MPI_STATUS_IGNORE),
            "MPI_Recv");
      return;
    }
    for (const int r : node)
      if (r != node.front()) check(MPI_Send(text.data(), longest, MPI_CHAR, r, 0, channel.collective), "MPI_Send");
  }
  bool all(bool mine) const {
    int every = mine ? 1 : 0;
    check(MPI_Allreduce(MPI_IN_PLACE, &every, 1, MPI_INT, MPI_MIN, channel.collective), "MPI_Allreduce");
    return every == 1;
  }
  std::vector<std::string> each(const std::string& mine) const {
    const auto own = text_of(mine);
    std::vector<Text> texts(static_cast<std::size_t>(channel.size));
    check(MPI_Allgather(own.data(), longest, MPI_CHAR, texts.data(), longest, MPI_CHAR, channel.collective),
          "MPI_Allgather");
    std::vector<std::string> all;
    for (const auto& text : texts) all.emplace_back(text.data());
    return all;
  }
};

/// The local ranks of `node` map a segment of `bytes`, each takes memory for its part. Empty if that fails anywhere.
template <class Talk>
std::shared_ptr<node::SharedSegment> map_together(const Talk& talk, int rank, const std::vector<int>& node,
                                                  std::size_t bytes, Part part) {
  const bool here = rank == node.front();
  auto segment = std::make_shared<node::SharedSegment>();
  std::string problem;
  if (here) {
    try {
      *segment = node::SharedSegment::create(bytes);
    } catch (const Error& error) {
      problem = error.what();
    }
  }

  // The name goes from the lowest rank of the node to the others; an empty one says that there is none.
  auto name = text_of(segment->name());
  talk.from_first(node, name);
  try {
    if (!here && name.front() != 0) *segment = node::SharedSegment::open(name.data(), bytes);
  } catch (const Error& error) {
    problem = error.what();
  }
  // All have it open, so that it needs no name any more, before memory is taken, which takes its time.
  bool everywhere = talk.all(segment->data() != nullptr);
  segment->unlink();
  if (everywhere) {
    try {
      segment->reserve(part.first, part.bytes);
    } catch (const Error& error) {
      problem = error.what();
    }
    everywhere = talk.all(problem.empty());
  }
  if (everywhere) return segment;

  static std::atomic<bool> warned{false};
  const auto problems = talk.each(problem);
  const auto first = std::find_if(problems.begin(), problems.end(), [](const auto& text) { return !text.empty(); });
  if (first != problems.end() && !warned.exchange(true) && rank == 0)
    log::warn("rank " + std::to_string(first - problems.begin()) + ": " + *first +
              ". Until then MPI carries what the ranks would share, which is slower.");
  return nullptr;
}

std::vector<int> ranks_of_node(const Topology& topology, int node) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < topology.node_of_rank.size(); ++r)
    if (topology.node_of_rank[r] == node) ranks.push_back(static_cast<int>(r));
  return ranks;
}

/// One rank on each node.
bool nobody_shares(const Communicator& communicator) {
  return communicator.topology().num_nodes == communicator.size();
}

}  // namespace

void attach_node(const Communicator& communicator) {
  const auto& topology = communicator.topology();
  auto node = std::make_unique<Node>();
  node->owners = communicator.size();
  for (int n = 0; n < topology.num_nodes; ++n) {
    node->owners_of_node.push_back(ranks_of_node(topology, n));
    node->owners = std::min(node->owners, static_cast<int>(node->owners_of_node.back().size()));
  }
  node->ranks = node->owners_of_node[static_cast<std::size_t>(topology.node_rank)];
  for (auto& owners : node->owners_of_node) owners.resize(static_cast<std::size_t>(node->owners));
  if (communicator.size() == 1) return;
  const auto bytes = node::Communicator::memory(topology.local_size);
  if (nobody_shares(communicator)) {
    // A communicator of this rank alone takes part in what goes between nodes.
    const auto memory = std::make_shared<std::vector<std::byte>>(bytes + node::page_size());
    auto* const first = memory->data() + node::page_size();
    node->communicator =
        std::make_unique<node::Communicator>(first - reinterpret_cast<std::uintptr_t>(first) % node::page_size(), 0, 1);
    node->memory = memory;
    communicator.channel()->node = std::move(node);
    return;
  }
  const bool root = topology.local_rank == 0;
  const auto segment =
      map_together(Unwoken{*communicator.channel()}, communicator.rank(), node->ranks, bytes, {0, root ? bytes : 0});
  if (!segment) return;
  node->memory = segment;
  node->communicator = std::make_unique<node::Communicator>(segment->data(), topology.local_rank, topology.local_size);
  communicator.channel()->node = std::move(node);
}

std::optional<SharedRegion> share(const Communicator& communicator, std::size_t bytes, std::size_t reserved) {
  const auto* node = communicator.channel()->node.get();
  if (node == nullptr || nobody_shares(communicator)) return std::nullopt;
  const auto page = node::page_size();
  const auto stride = std::max<std::size_t>(1, (bytes + page - 1) / page) * page;
  const int local = communicator.topology().local_rank;
  auto segment = map_together(Woken{communicator}, communicator.rank(), node->ranks, stride * node->ranks.size(),
                              {static_cast<std::size_t>(local) * stride, reserved});
  if (!segment) return std::nullopt;
  const node::Region region{segment->data(), stride, segment};
  return SharedRegion{std::move(segment), region, local};
}

SharedMemory shared_memory(const Communicator& communicator, std::size_t bytes) {
  if (const auto shared = share(communicator, bytes, bytes)) {
    communicator.channel()->node->communicator->add(shared->region);
    // The engine keeps the addresses; the memory itself goes with its last user on this rank.
    const auto release = [shared = *shared](std::byte* data) {
      shared.segment->discard(static_cast<std::size_t>(data - shared.region.base), shared.region.stride);
    };
    return {std::shared_ptr<std::byte>(shared->data(), release), bytes};
  }
  return {std::shared_ptr<std::byte>(new std::byte[bytes](), std::default_delete<std::byte[]>()), bytes};
}

bool reaches_beyond_this_call(const Communicator& communicator, const void* data, std::size_t bytes) {
  if (communicator.size() == 1) return false;
  const auto& channel = *communicator.channel();
  if (!channel.node) return true;
  // Inside a node only this rank writes to its own memory; a region lives as long as the channel.
  return communicator.topology().num_nodes > 1 && !channel.node->communicator->registered(data, bytes);
}

}  // namespace muster::detail::comm
