#include "comm/hierarchy.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace muster::detail::comm {
namespace {

/// Exchanges that run at the same time may post their messages in different orders on different nodes, so each exchange
/// has two tags of its own. Tag 0 belongs to Collectives::all_to_all(). Every MPI has tags up to 32,767.
constexpr unsigned tags = 8192;
int scatter_tag(unsigned number) { return static_cast<int>(1 + 2 * (number % tags)); }
int gather_tag(unsigned number) { return scatter_tag(number) + 1; }

/// How often a test calls MPI, at most: Open MPI polls its sockets only in every eighth call that advances operations.
constexpr int calls_per_poll = 8;

/// For slices of up to this many bytes, a second exchange (gathering) costs more than it saves. The limit is lower for
/// many nodes, since each leader gets the whole slice of every node.
constexpr std::size_t short_bytes(int nodes) {
  return std::min(std::size_t{16} << 10, (std::size_t{128} << 10) / static_cast<std::size_t>(nodes));
}
/// Up to this many nodes, each leader sends a short slice directly to all others. With more nodes, the exchange goes in
/// rounds.
constexpr int few_nodes = 8;
/// An all-reduce is cut into pieces of this size so that network and memory work at the same time. With larger pieces
/// the messages of the second exchange wait behind those of the first: pieces of 4 MB take 1.3 times as long on a link
/// of 1 Gbit/s. Slices of such a piece are longer than short_bytes().
std::size_t piece_bytes(int leaders) {
  return std::max(std::size_t{1} << 20, static_cast<std::size_t>(leaders) * (std::size_t{256} << 10));
}
/// A piece is split among fewer leaders if each would otherwise have less than this many bytes.
constexpr std::size_t split_bytes = std::size_t{32} << 10;

}  // namespace

/// The exchange of one slice among its leaders, one on each node. Each leader reduces its share of the slice and sends
/// the result to the others; a short slice is reduced whole by every leader. Sums are formed in the order of nodes, so
/// all leaders get the same bits. With many nodes n, short slices reach all nodes in ⌈log₂ n⌉ rounds: in a round, a
/// leader that has k slices sends them to the leader k nodes before it, and receives k slices from the leader k nodes
/// after it (fewer in the last round).
class SliceExchange {
 public:
  SliceExchange(Channel& channel, std::byte* data, std::size_t count, const node::Reduction& reduction)
      : channel_(channel), data_(data), count_(count), reduction_(reduction) {
    event_ = {.name = "network",
              .track = watch::TraceTrack::network,
              .begin_ns = watch::trace_begin(),
              .bytes = static_cast<std::int64_t>(count_ * size_of(reduction_.type))};
    if (in_rounds_)
      begin_rounds();
    else
      scatter();
  }
  ~SliceExchange() {
    if (memory_->pending.empty()) return;
    const auto sends = memory_->pending.begin() + static_cast<std::ptrdiff_t>(memory_->num_receives);
    const std::vector<MPI_Request> receives(memory_->pending.begin(), sends), others(sends, memory_->pending.end());
    // MPI may also still use memory that the node's communicator owns.
    memory_->hierarchy = channel_.transport->hierarchy;
    channel_.transport->collective->abandon(receives, others, memory_);
  }
  SliceExchange(const SliceExchange&) = delete;
  SliceExchange& operator=(const SliceExchange&) = delete;

  /// Advances; true once the exchange has finished.
  bool advance() {
    if (state_ == State::scattering && test()) {
      if (in_rounds_ && !next_round()) return false;
      reduce_share();
      state_ = whole_ ? State::done : State::gathering;
      if (!whole_) gather();
    }
    if (state_ == State::gathering && test()) state_ = State::done;
    if (state_ != State::done) return false;
    watch::record_until_now(event_);
    return true;
  }

 private:
  node::Slice share_of(int node) const {
    return whole_ ? node::Slice{0, count_} : node::slice_of(count_, nodes_, node, reduction_.type);
  }
  std::byte* at(std::size_t element) const { return data_ + element * size_of(reduction_.type); }

  template <class Body>
  void for_other_nodes(Body&& body) {
    for (int n = 0; n < nodes_; ++n)
      if (n != here_) body(n);
  }
  /// The slice's leader on `node`.
  int leader(int node) const {
    const auto slice = static_cast<std::size_t>(channel_.topology.local_rank);
    return channel_.hierarchy()->leaders_of_node[static_cast<std::size_t>(node)][slice];
  }
  void send(const std::byte* data, std::size_t count, int node, int tag) {
    memory_->pending.push_back(channel_.transport->collective->send(data, static_cast<int>(count),
                                                                    mpi_type(reduction_.type), leader(node), tag));
  }
  void receive(std::byte* data, std::size_t count, int node, int tag) {
    check(MPI_Irecv(data, static_cast<int>(count), mpi_type(reduction_.type), leader(node), tag,
                    channel_.transport->collective, &memory_->pending.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Irecv");
    ++memory_->num_receives;
  }

  void scatter() {
    const auto mine = share_of(here_).count;
    const auto bytes = mine * size_of(reduction_.type);
    memory_->received = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(nodes_ - 1) * bytes);
    auto* into = memory_->received.get();
    for_other_nodes([&](int n) {
      receive(into, mine, n, scatter_tag(number_));
      into += bytes;
    });
    for_other_nodes([&](int n) { send(at(share_of(n).first), share_of(n).count, n, scatter_tag(number_)); });
  }

  std::size_t slice_bytes() const { return count_ * size_of(reduction_.type); }

  void begin_rounds() {
    memory_->received = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(nodes_) * slice_bytes());
    std::memcpy(memory_->received.get(), data_, slice_bytes());
    start_round();
  }
  void start_round() {
    const auto count = static_cast<std::size_t>(std::min(known_slices_, nodes_ - known_slices_)) * count_;
    receive(memory_->received.get() + static_cast<std::size_t>(known_slices_) * slice_bytes(), count,
            (here_ + known_slices_) % nodes_, scatter_tag(number_));
    send(memory_->received.get(), count, (here_ + nodes_ - known_slices_) % nodes_, scatter_tag(number_));
  }
  /// True if the last round has ended.
  bool next_round() {
    known_slices_ = std::min(2 * known_slices_, nodes_);
    if (known_slices_ < nodes_) start_round();
    return known_slices_ == nodes_;
  }

  void reduce_share() {
    const auto mine = share_of(here_);
    void* const target = at(mine.first);
    std::vector<const void*> sources;
    for (int n = 0; n < nodes_; ++n) {
      if (in_rounds_ && n != here_) {
        sources.push_back(memory_->received.get() +
                          static_cast<std::size_t>((n - here_ + nodes_) % nodes_) * slice_bytes());
        continue;
      }
      const auto others = static_cast<std::size_t>(n < here_ ? n : n - 1);
      sources.push_back(n == here_ ? target : memory_->received.get() + others * mine.count * size_of(reduction_.type));
    }
    node::reduce_arrays(std::span(&target, 1), sources, mine.count, reduction_);
  }

  void gather() {
    for_other_nodes([&](int n) { receive(at(share_of(n).first), share_of(n).count, n, gather_tag(number_)); });
    const auto mine = share_of(here_);
    for_other_nodes([&](int n) { send(at(mine.first), mine.count, n, gather_tag(number_)); });
  }

  bool test() {
    bool completed = false;
    for (int call = 0; call < calls_per_poll && !completed; ++call) completed = test_all(memory_->pending);
    if (!completed) return false;
    memory_->pending.clear();
    memory_->num_receives = 0;
    return true;
  }

  Channel& channel_;  ///< the hierarchy of this channel owns this exchange
  std::byte* data_;
  std::size_t count_;
  node::Reduction reduction_;
  const int nodes_ = channel_.topology.num_nodes;
  const int here_ = channel_.topology.node_rank;
  const unsigned number_ = channel_.hierarchy()->exchanges++;  ///< the same on all nodes
  /// True if every leader reduces the whole slice: one exchange instead of two.
  const bool whole_ = slice_bytes() <= short_bytes(nodes_);
  const bool in_rounds_ = whole_ && nodes_ > few_nodes;
  int known_slices_ = 1;  ///< in rounds: how many slices this leader has: those of its node and the nodes after it
  struct Memory {
    std::unique_ptr<std::byte[]> received;  ///< [nodes - 1] shares; in rounds [nodes] slices, from this node on
    std::vector<MPI_Request> pending;       ///< receives first, then sends
    std::size_t num_receives = 0;
    std::shared_ptr<Hierarchy> hierarchy = nullptr;
  };
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();  ///< used by MPI
  enum class State { scattering, gathering, done } state_ = State::scattering;
  watch::TraceEvent event_ = {};
};

/// One all-reduce over several nodes: cuts the array into pieces, reduces each piece inside the node, and exchanges the
/// slices that this rank leads.
class HierarchicalAllReduce {
 public:
  HierarchicalAllReduce(Channel& channel, std::byte* data, std::size_t count, const node::Reduction& reduction)
      : channel_(channel), local_(*channel.hierarchy()->communicator), reduction_(reduction) {
    const auto element = size_of(reduction.type);
    const auto most = std::max<std::size_t>(1, piece_bytes(channel_.hierarchy()->leaders) / element);
    // The exchange between nodes multiplies the complete sums by the scale.
    auto inside = reduction;
    inside.scale = 1.0;
    // While one piece is on the network, the next is reduced inside the node.
    for (std::size_t first = 0; first < count; first += most) {
      const auto n = std::min(most, count - first);
      const int leaders = std::clamp(static_cast<int>(n * element / split_bytes), 1, channel_.hierarchy()->leaders);
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
        piece.exchange = std::make_unique<SliceExchange>(channel_, piece.data + mine.first * size_of(reduction_.type),
                                                         mine.count, reduction_);
      }
      if (!piece.exchange->advance()) continue;
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
    bool exchanged = false;  ///< also true if this rank leads no slice of the piece
  };

  /// Starts to copy the slices of all leaders to all ranks of the node. The operation is closed if this rank's slice
  /// has yet to be exchanged.
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
