#include "comm/shared_memory.hpp"

#include "base/text.hpp"
#include "comm/channel.hpp"
#include "comm/handshake.hpp"
#include "comm/rendezvous.hpp"

#include <algorithm>
#include <cstdint>
#include <string>

namespace muster::detail::comm {
namespace {

/// True if ranks of a node share memory, the same on all ranks.
bool can_share(const Channel& channel) { return channel.hierarchy() && channel.topology.num_nodes != channel.size; }

}  // namespace

std::optional<SharedRegion> allocate_shared(const Communicator& communicator, std::size_t bytes, std::size_t reserved) {
  const auto& channel = *Channel::of(communicator);
  if (!can_share(channel)) return std::nullopt;
  wait_for_all_ranks(communicator, "sharing memory on a node");
  const auto stride = node::whole_pages(std::max<std::size_t>(1, bytes));
  const int local = channel.topology.local_rank;
  const auto& node = channel.hierarchy()->ranks;
  auto segment = map_node_segment(*channel.transport->collective, node, stride * node.size(),
                                  static_cast<std::size_t>(local) * stride, reserved);
  if (!segment) return std::nullopt;
  const node::Region region{segment->data(), stride, segment};
  return SharedRegion{std::move(segment), region, local};
}

SharedRegion own_region(std::size_t bytes) {
  const auto memory = node::local_memory(bytes);
  return {nullptr, {memory.get(), node::whole_pages(std::max<std::size_t>(1, bytes)), memory}, 0};
}

std::shared_ptr<node::SharedSegment> map_segment(const Communicator& communicator, std::size_t bytes,
                                                 std::size_t reserved, const char* until_then) {
  const auto& channel = *Channel::of(communicator);
  if (!channel.hierarchy()) return nullptr;
  wait_for_all_ranks(communicator, "sharing memory on a node");
  return map_node_segment(*channel.transport->collective, channel.hierarchy()->ranks, bytes, 0, reserved, until_then);
}

namespace {

/// Gives back the regions that no rank uses any more. A region that one rank still uses must stay registered on all.
/// Collective.
void release_unused(const Communicator& communicator, Channel& channel) {
  if (!can_share(channel)) return;
  auto& node = *channel.hierarchy()->communicator;
  auto unused = channel.run_exclusively([&] { return node.unused_regions(); });
  const auto word = [](std::uint64_t region) { return str(" ", region, " "); };
  std::string mine;
  for (const auto region : unused) mine += word(region);
  for (const auto& of_rank : communicator.all_gather(mine))
    std::erase_if(unused, [&](auto region) { return of_rank.find(word(region)) == std::string::npos; });
  channel.run_exclusively([&] {
    for (const auto region : unused) node.unregister(region);
  });
}

}  // namespace

std::shared_ptr<std::byte> shared_memory(const Communicator& communicator, std::size_t bytes) {
  auto& channel = *Channel::of(communicator);
  // Called first, since the new region needs a file descriptor. If an error ends this on some ranks only, an old region
  // stays registered, which does no harm.
  release_unused(communicator, channel);
  const auto shared = allocate_shared(communicator, bytes, bytes);
  if (!shared) return node::local_memory(bytes);
  // The ranks do not communicate between the allocation and this call, so either all or none register the region, and
  // it has the same number on all of them.
  channel.run_exclusively([&] { channel.hierarchy()->communicator->register_region(shared->region); });
  // The node's communicator keeps the region registered for the other ranks; the pages are freed with their last user
  // on this rank.
  return {shared->data(), [shared = *shared](std::byte* data) {
            shared.segment->discard(static_cast<std::size_t>(data - shared.region.base), shared.region.stride);
          }};
}

bool may_be_written_later(const Communicator& communicator, const void* data, std::size_t bytes) {
  if (communicator.size() == 1) return false;
  const auto& channel = *Channel::of(communicator);
  if (!channel.hierarchy()) return true;
  // Within one node, only this rank writes to its own memory. Between nodes, MPI may write to it, but registered memory
  // lives as long as operations use it.
  return channel.topology.num_nodes > 1 && !channel.hierarchy()->communicator->is_registered(data, bytes);
}

}  // namespace muster::detail::comm
