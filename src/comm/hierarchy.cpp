#include "comm/hierarchy.hpp"

#include "comm/mpi_call.hpp"
#include "comm/reduction.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::comm {
namespace {

/// Messages of exchanges that are under way at the same time may be posted in different orders on different nodes, so
/// each exchange has two tags of its own, after the 0 that Collectives::exchange() uses. Every MPI has 32,767.
constexpr unsigned tags = 8192;
int scatter_tag(unsigned number) { return static_cast<int>(1 + 2 * (number % tags)); }
int gather_tag(unsigned number) { return scatter_tag(number) + 1; }

/// Open MPI looks at its sockets in every eighth of the calls that make progress.
constexpr int calls_per_look = 8;

/// Up to this many bytes, a second exchange costs more than what it saves.
constexpr std::size_t short_bytes = std::size_t{16} << 10;
/// Of which network and memory are busy at the same time. Of larger ones a message of the second exchange waits behind
/// those of the first: pieces of 4 MB take 1.3 times as long on a link of 1 Gbit/s. Slices stay above short_bytes.
std::size_t piece_bytes(int owners) {
  return std::max(std::size_t{1} << 20, static_cast<std::size_t>(owners) * (std::size_t{256} << 10));
}
/// An owner has at least so many, where there are: below, the first one sends one message.
constexpr std::size_t split_bytes = std::size_t{32} << 10;

}  // namespace

struct SliceExchange::Memory {
  std::unique_ptr<std::byte[]> received;  // [nodes - 1] parts
  std::vector<MPI_Request> pending;
};

SliceExchange::SliceExchange(std::shared_ptr<Channel> channel, std::byte* data, std::size_t count,
                             const node::Reduction& reduction)
    : channel_(std::move(channel)),
      data_(data),
      count_(count),
      reduction_(reduction),
      nodes_(channel_->topology.num_nodes),
      here_(channel_->topology.node_rank),
      number_(channel_->node->exchanges++),
      whole_(count * size_of(reduction.type) <= short_bytes),
      memory_(std::make_unique<Memory>()) {
  scatter();
}

SliceExchange::~SliceExchange() {
  // MPI may still read or write there, so this memory is given up for good.
  if (!memory_->pending.empty()) static_cast<void>(memory_.release());
}

node::Team::Slice SliceExchange::part_of(int node) const {
  return whole_ ? node::Team::Slice{0, count_} : node::Team::slice(count_, nodes_, node, reduction_.type);
}

void SliceExchange::send(const std::byte* data, std::size_t count, int node, int tag) {
  const int owner = channel_->topology.local_rank;
  const int peer = channel_->node->owners_of_node[static_cast<std::size_t>(node)][static_cast<std::size_t>(owner)];
  memory_->pending.push_back(MPI_REQUEST_NULL);
  check(MPI_Isend(data, static_cast<int>(count), mpi_type(reduction_.type), peer, tag, channel_->collective,
                  &memory_->pending.back()),
        "MPI_Isend");
}

void SliceExchange::receive(std::byte* data, std::size_t count, int node, int tag) {
  const int owner = channel_->topology.local_rank;
  const int peer = channel_->node->owners_of_node[static_cast<std::size_t>(node)][static_cast<std::size_t>(owner)];
  memory_->pending.push_back(MPI_REQUEST_NULL);
  check(MPI_Irecv(data, static_cast<int>(count), mpi_type(reduction_.type), peer, tag, channel_->collective,
                  &memory_->pending.back()),
        "MPI_Irecv");
}

void SliceExchange::scatter() {
  const auto element = size_of(reduction_.type);
  const auto mine = part_of(here_).count;
  memory_->received =
      std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(nodes_ - 1) * mine * element);
  auto* into = memory_->received.get();
  for (int n = 0; n < nodes_; ++n) {
    if (n == here_) continue;
    receive(into, mine, n, scatter_tag(number_));
    into += mine * element;
  }
  for (int n = 0; n < nodes_; ++n) {
    if (n == here_) continue;
    const auto theirs = part_of(n);
    send(data_ + theirs.first * element, theirs.count, n, scatter_tag(number_));
  }
}

void SliceExchange::reduce_mine() {
  const auto element = size_of(reduction_.type);
  const auto mine = part_of(here_);
  void* const target = data_ + mine.first * element;
  std::vector<const void*> sources;
  const auto* received = memory_->received.get();
  for (int n = 0; n < nodes_; ++n) {
    sources.push_back(n == here_ ? target : received);
    if (n != here_) received += mine.count * element;
  }
  node::reduce_arrays(std::span(&target, 1), sources, mine.count, reduction_);
}

void SliceExchange::gather() {
  const auto element = size_of(reduction_.type);
  for (int n = 0; n < nodes_; ++n) {
    if (n == here_) continue;
    const auto theirs = part_of(n);
    receive(data_ + theirs.first * element, theirs.count, n, gather_tag(number_));
  }
  const auto mine = part_of(here_);
  for (int n = 0; n < nodes_; ++n)
    if (n != here_) send(data_ + mine.first * element, mine.count, n, gather_tag(number_));
}

bool SliceExchange::test() {
  int flag = 0;
  for (int call = 0; call < calls_per_look && flag == 0; ++call)
    check(MPI_Testall(static_cast<int>(memory_->pending.size()), memory_->pending.data(), &flag, MPI_STATUSES_IGNORE),
          "MPI_Testall");
  if (flag) memory_->pending.clear();
  return flag != 0;
}

bool SliceExchange::advance() {
  if (state_ == State::scattering && test()) {
    reduce_mine();
    state_ = whole_ ? State::done : State::gathering;
    if (!whole_) gather();
  }
  if (state_ == State::gathering && test()) state_ = State::done;
  return state_ == State::done;
}

std::shared_ptr<HierarchicalAllReduce> HierarchicalAllReduce::start(std::shared_ptr<Channel> channel, void* data,
                                                                    std::size_t count,
                                                                    const node::Reduction& reduction) {
  const std::shared_ptr<HierarchicalAllReduce> whole(new HierarchicalAllReduce(std::move(channel), reduction));
  auto& node = *whole->channel_->node;
  const auto element = size_of(reduction.type);
  const auto most = std::max<std::size_t>(1, piece_bytes(node.owners) / element);
  for (std::size_t first = 0; first < count; first += most) {
    const auto n = std::min(most, count - first);
    whole->pieces_.push_back({.data = static_cast<std::byte*>(data) + first * element,
                              .count = n,
                              .owners = std::clamp(static_cast<int>(n * element / split_bytes), 1, node.owners)});
  }
  // The sums of the nodes are multiplied once they are whole.
  auto inside = reduction;
  inside.scale = 1.0;
  // One piece is on the network while the next is reduced.
  const auto share = [&](Piece& piece) {
    piece.shared = node.team->all_gather(piece.data, piece.count, piece.owners, reduction.type,
                                         [whole, &piece] { return whole->exchange(piece); });
  };
  for (std::size_t i = 0; i < whole->pieces_.size(); ++i) {
    auto& piece = whole->pieces_[i];
    piece.reduced = node.team->reduce_scatter(piece.data, piece.count, piece.owners, inside);
    if (i > 0) share(whole->pieces_[i - 1]);
  }
  if (!whole->pieces_.empty()) share(whole->pieces_.back());
  return whole;
}

bool HierarchicalAllReduce::exchange(Piece& piece) {
  if (piece.exchanged) return true;
  auto& team = *channel_->node->team;
  if (!piece.exchange) {
    if (!team.finished(piece.reduced)) return false;
    const auto mine = node::Team::slice(piece.count, piece.owners, team.rank(), reduction_.type);
    piece.exchange = std::make_unique<SliceExchange>(channel_, piece.data + mine.first * size_of(reduction_.type),
                                                     mine.count, reduction_);
  }
  piece.exchanged = piece.exchange->advance();
  if (piece.exchanged) piece.exchange.reset();
  return piece.exchanged;
}

bool HierarchicalAllReduce::advance() {
  if (pieces_.empty()) return true;
  auto& team = *channel_->node->team;
  const bool done = team.done(pieces_.back().shared);
  if (!done)
    for (auto& piece : pieces_)
      if (team.rank() < piece.owners && team.finished(piece.reduced)) exchange(piece);
  return done;
}

}  // namespace muster::detail::comm
