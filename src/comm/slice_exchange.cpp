#include "comm/slice_exchange.hpp"

#include "comm/mpi_call.hpp"
#include "comm/mpi_communicator.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::comm {
namespace {

/// Exchanges that run at the same time may post their messages in different orders on different nodes, so each exchange
/// has two tags of its own. Tag 0 belongs to Collectives::all_to_all(). Every MPI has tags up to 32,767.
int scatter_tag(unsigned number) { return static_cast<int>(1 + 2 * number); }
static_assert(2 + 2 * SliceExchange::numbers <= 32'700, "higher tags are those of rendezvous and handshake");

/// For slices of up to this many bytes, a second exchange (gathering) costs more than it saves. The limit is lower for
/// many nodes, since each leader gets the whole slice of every node.
constexpr std::size_t short_bytes(int nodes) {
  return std::min(std::size_t{16} << 10, (std::size_t{128} << 10) / static_cast<std::size_t>(nodes));
}
/// Up to this many nodes, each leader sends a short slice directly to all others. With more nodes, the exchange goes in
/// rounds.
constexpr int few_nodes = 8;

template <class Body>
void for_other_nodes(const Leaders& leaders, Body&& body) {
  for (int n = 0; n < leaders.nodes(); ++n)
    if (n != leaders.node) body(n);
}

}  // namespace

std::size_t slice_bytes(int nodes, int leaders) noexcept {
  constexpr std::size_t kib = 1024;
  return std::max(
      {1024 * kib / static_cast<std::size_t>(leaders), 256 * kib, static_cast<std::size_t>(nodes) * 64 * kib});
}

struct SliceExchange::Memory {
  std::unique_ptr<std::byte[]> received = {};  ///< [nodes - 1] shares; in rounds [nodes] slices, from this node on
  std::vector<MPI_Request> pending = {};       ///< receives first, then sends
  std::size_t num_receives = 0;
  std::shared_ptr<void> slice = {};
};

SliceExchange::Reduce SliceExchange::sum_of(const Slice& slice, const node::Reduction& reduction) {
  return [result = slice.result, reduction](const node::Slice& share, std::span<const void* const> summands) {
    void* const target = result + share.first * node::size_of(reduction.type);
    node::reduce_arrays(std::span(&target, 1), summands, share.count, reduction);
  };
}

SliceExchange::SliceExchange(const Leaders& leaders, unsigned number, const Slice& slice, Reduce reduce,
                             std::shared_ptr<void> lifetime, Halves halves)
    : leaders_(leaders),
      tag_(scatter_tag(number)),
      slice_(slice),
      reduce_(std::move(reduce)),
      halves_(halves),
      whole_(halves == Halves::both && bytes() <= short_bytes(leaders.nodes())),
      in_rounds_(whole_ && leaders.nodes() > few_nodes),
      memory_(new Memory{.slice = std::move(lifetime)}) {
  if (halves_ == Halves::gather)
    gather();
  else if (in_rounds_)
    begin_rounds();
  else
    scatter();
}

SliceExchange::~SliceExchange() {
  if (memory_->pending.empty()) return;
  const auto sends = memory_->pending.begin() + static_cast<std::ptrdiff_t>(memory_->num_receives);
  leaders_.communicator->abandon({memory_->pending.begin(), sends}, {sends, memory_->pending.end()}, memory_);
}

bool SliceExchange::advance(int calls) {
  if (state_ == State::scattering && test(calls)) {
    if (in_rounds_ && !next_round()) return false;
    reduce_share();
    state_ = State::done;
    if (!whole_ && halves_ == Halves::both) gather();
  }
  if (state_ == State::gathering && test(calls)) state_ = State::done;
  return state_ == State::done;
}

void SliceExchange::wait() {
  int count = 0;
  std::vector<int> completed(memory_->pending.size());
  check(MPI_Waitsome(static_cast<int>(memory_->pending.size()), memory_->pending.data(), &count, completed.data(),
                     MPI_STATUSES_IGNORE),
        "MPI_Waitsome");
}

node::Slice SliceExchange::share_of(int node) const {
  return whole_ ? node::Slice{0, slice_.count} : leaders_.share(slice_.count, slice_.type, node);
}

void SliceExchange::send(const std::byte* data, std::size_t count, int node, int tag) {
  if (count == 0) return;
  memory_->pending.push_back(leaders_.communicator->send(data, static_cast<int>(count), mpi_type(slice_.type),
                                                         leaders_.ranks[static_cast<std::size_t>(node)], tag));
}

void SliceExchange::receive(std::byte* data, std::size_t count, int node, int tag) {
  if (count == 0) return;
  check(MPI_Irecv(data, static_cast<int>(count), mpi_type(slice_.type), leaders_.ranks[static_cast<std::size_t>(node)],
                  tag, leaders_.communicator->comm, &memory_->pending.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Irecv");
  ++memory_->num_receives;
}

void SliceExchange::scatter() {
  const auto mine = share_of(leaders_.node).count;
  const auto element = node::size_of(slice_.type);
  memory_->received =
      std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(leaders_.nodes() - 1) * mine * element);
  auto* into = memory_->received.get();
  for_other_nodes(leaders_, [&](int n) {
    receive(into, mine, n, tag_);
    into += mine * element;
  });
  for_other_nodes(leaders_,
                  [&](int n) { send(slice_.summand + share_of(n).first * element, share_of(n).count, n, tag_); });
}

void SliceExchange::begin_rounds() {
  memory_->received = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(leaders_.nodes()) * bytes());
  std::memcpy(memory_->received.get(), slice_.summand, bytes());
  start_round();
}

void SliceExchange::start_round() {
  const int nodes = leaders_.nodes();
  const auto count = static_cast<std::size_t>(std::min(known_slices_, nodes - known_slices_)) * slice_.count;
  receive(memory_->received.get() + static_cast<std::size_t>(known_slices_) * bytes(), count,
          (leaders_.node + known_slices_) % nodes, tag_);
  send(memory_->received.get(), count, (leaders_.node + nodes - known_slices_) % nodes, tag_);
}

/// Call it when a round has ended. Starts the next one; true if there is none.
bool SliceExchange::next_round() {
  known_slices_ = std::min(2 * known_slices_, leaders_.nodes());
  if (known_slices_ < leaders_.nodes()) start_round();
  return known_slices_ == leaders_.nodes();
}

void SliceExchange::reduce_share() {
  const auto mine = share_of(leaders_.node);
  const auto element = node::size_of(slice_.type);
  std::vector<const void*> summands;
  for (int n = 0; n < leaders_.nodes(); ++n) {
    // `received` has, in rounds, the slices of all nodes from this node on; otherwise the shares of the other nodes.
    const int position =
        in_rounds_ ? (n - leaders_.node + leaders_.nodes()) % leaders_.nodes() : n - (n > leaders_.node ? 1 : 0);
    summands.push_back(n == leaders_.node
                           ? slice_.summand + mine.first * element
                           : memory_->received.get() + static_cast<std::size_t>(position) * mine.count * element);
  }
  reduce_(mine, summands);
}

void SliceExchange::gather() {
  state_ = State::gathering;
  const auto element = node::size_of(slice_.type);
  for_other_nodes(leaders_,
                  [&](int n) { receive(slice_.result + share_of(n).first * element, share_of(n).count, n, tag_ + 1); });
  const auto mine = share_of(leaders_.node);
  for_other_nodes(leaders_, [&](int n) { send(slice_.result + mine.first * element, mine.count, n, tag_ + 1); });
}

bool SliceExchange::test(int calls) {
  bool completed = false;
  for (int call = 0; call < calls && !completed; ++call) completed = test_all(memory_->pending);
  if (!completed) return false;
  memory_->pending.clear();
  memory_->num_receives = 0;
  return true;
}

}  // namespace muster::detail::comm
