#include "comm/hierarchy.hpp"

#include "comm/channel.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace muster::detail::comm {
namespace {

/// Of the exchange numbers of a communicator, all-reduces use the first half, and the exchange of gradients the others.
constexpr unsigned number_count = SliceExchange::numbers / 2;

/// A piece is split among fewer leaders if each would otherwise have less than this many bytes.
constexpr std::size_t split_bytes = std::size_t{32} << 10;

}  // namespace

/// One all-reduce over several nodes: cuts the array into pieces, reduces each piece inside the node, and exchanges the
/// slices that this rank leads.
class HierarchicalAllReduce {
 public:
  HierarchicalAllReduce(Channel& channel, std::byte* data, std::size_t count, const node::Reduction& reduction)
      : channel_(channel), local_(*channel.hierarchy()->communicator), reduction_(reduction) {
    const auto element = size_of(reduction.type);
    const int all = channel_.hierarchy()->num_leaders;
    const auto most = static_cast<std::size_t>(all) * slice_bytes(channel_.topology.num_nodes, all) / element;
    // The exchange between nodes multiplies the complete sums by the scale.
    auto inside = reduction;
    inside.scale = 1.0;
    // While one piece is on the network, the next is reduced inside the node.
    for (std::size_t first = 0; first < count; first += most) {
      const auto n = std::min(most, count - first);
      const int leaders = std::clamp(static_cast<int>(n * element / split_bytes), 1, all);
      auto* const begin = data + first * element;
      const auto reduced = local_.reduce_scatter(begin, n, leaders, inside);
      if (!pieces_.empty()) start_gather(pieces_.back());
      pieces_.push_back(
          {.data = begin, .count = n, .leaders = leaders, .reduced = reduced, .exchanged = local_.rank() >= leaders});
    }
    if (!pieces_.empty()) start_gather(pieces_.back());
  }

  void advance() {
    if (local_.done(ticket())) return;
    while (first_ < pieces_.size() && pieces_[first_].exchanged) ++first_;
    for (auto i = first_; i < pieces_.size() && local_.is_finished(pieces_[i].reduced); ++i) {
      auto& piece = pieces_[i];
      if (piece.exchanged) continue;
      if (!piece.exchange) {
        const auto mine = node::slice_of(piece.count, piece.leaders, local_.rank(), reduction_.type);
        auto* const data = piece.data + mine.first * size_of(reduction_.type);
        const SliceExchange::Slice slice{data, data, mine.count, reduction_.type};
        piece.event = {.name = "network",
                       .track = watch::TraceTrack::network,
                       .begin_ns = watch::trace_begin(),
                       .bytes = static_cast<std::int64_t>(mine.count * size_of(reduction_.type))};
        auto& hierarchy = *channel_.hierarchy();
        // MPI may use memory that the node's communicator owns.
        piece.exchange =
            std::make_unique<SliceExchange>(hierarchy.leaders, hierarchy.exchanges++ % number_count, slice,
                                            SliceExchange::sum_of(slice, reduction_), channel_.transport->hierarchy);
      }
      if (!piece.exchange->advance()) continue;
      watch::record_until_now(piece.event);
      piece.exchange.reset();
      piece.exchanged = true;
      local_.open(piece.gathered);
    }
  }

  node::NodeCommunicator::Ticket ticket() const noexcept { return pieces_.empty() ? 0 : pieces_.back().gathered; }

 private:
  struct Piece {
    std::byte* data = nullptr;
    std::size_t count = 0;
    int leaders = 1;
    node::NodeCommunicator::Ticket reduced = 0;
    node::NodeCommunicator::Ticket gathered = 0;
    std::unique_ptr<SliceExchange> exchange = nullptr;
    watch::TraceEvent event = {};
    bool exchanged = false;  ///< also true if this rank leads no slice of the piece
  };

  /// Starts to copy the slices of all leaders to all ranks of the node. If this rank's slice has yet to be exchanged,
  /// the copying is held up (Start::closed).
  void start_gather(Piece& piece) {
    using Start = node::NodeCommunicator::Start;
    piece.gathered = local_.all_gather(piece.data, piece.count, piece.leaders, reduction_.type,
                                       piece.exchanged ? Start::open : Start::closed);
  }

  Channel& channel_;  ///< the hierarchy of this channel owns this all-reduce
  node::NodeCommunicator& local_;
  node::Reduction reduction_;
  std::vector<Piece> pieces_;
  std::size_t first_ = 0;  ///< first piece that has not been exchanged
};

const Leaders& leaders_of(const Communicator& communicator) noexcept {
  return Channel::of(communicator)->hierarchy()->leaders;
}

int num_leaders(const Communicator& communicator) noexcept {
  return Channel::of(communicator)->hierarchy()->num_leaders;
}

node::NodeCommunicator::Ticket all_reduce_over_nodes(Channel& channel, void* data, std::size_t count,
                                                     const node::Reduction& reduction) {
  const auto started =
      std::make_shared<HierarchicalAllReduce>(channel, static_cast<std::byte*>(data), count, reduction);
  channel.hierarchy()->over_nodes.push_back(started);
  advance_over_nodes(channel);
  return started->ticket();
}

void advance_over_nodes(Channel& channel) {
  if (!channel.hierarchy()) return;
  auto& under_way = channel.hierarchy()->over_nodes;
  for (const auto& all_reduce : under_way) all_reduce->advance();
  while (!under_way.empty() && channel.hierarchy()->communicator->is_finished(under_way.front()->ticket()))
    under_way.pop_front();
}

}  // namespace muster::detail::comm
