#include "live/connection.hpp"
#include "live/receiver.hpp"
#include "live/sender/channel.h"

#include <algorithm>
#include <array>

namespace muster::detail::live {
namespace {

using Channel = std::unique_ptr<live_channel, void (*)(live_channel*)>;

/// Weights that MPI still reads.
using WeightsSends = std::vector<std::pair<MPI_Request, std::shared_ptr<std::byte>>>;

/// What all connections use.
struct Shared {
  const Stream& stream;
  Channel channel{nullptr, live_channel_close};
  WeightsSends sends = {};
};

class MpiConnection final : public Connection {
 public:
  MpiConnection(Shared& shared, int rank, int tag, std::int64_t first)
      : shared_(shared), rank_(rank), tag_(tag), answered_(first), allowed_(first) {
    receives_.fill(MPI_REQUEST_NULL);
  }

  bool is_from(int rank, int tag) const noexcept { return rank_ == rank && tag_ == tag; }
  bool is_open() const noexcept override { return is_open_; }
  bool is_closing() const noexcept override { return end_ >= 0; }

  void tell() override {
    live_message message{};
    message.kind = LIVE_TOLD;
    message.seq = allowed_;
    message.of.told.next = -1;
    message.of.told.gone = 1;
    if (ring) message.of.told = ring->told;
    live_channel_send(shared_.channel.get(), rank_, tag_, message);
  }

  void send_weights(const Weights& weights) override {
    live_message message{};
    message.kind = LIVE_WEIGHTS;
    message.of.weights = weights.head;
    live_channel_send(shared_.channel.get(), rank_, tag_, message);
    shared_.sends.emplace_back(
        live_send_slot(weights.memory.get(), weights.head.bytes, rank_, live_channel_tag(shared_.channel.get())),
        weights.memory);
  }

  void leave() override {
    if (ring) __atomic_store_n(&ring->told.gone, 1, __ATOMIC_SEQ_CST);
    if (is_open_) tell();
    // MPI may still receive into it, and must: otherwise the solver's sends would not end.
    if (std::exchange(is_open_, false) && ring) static_cast<void>(new std::shared_ptr<live_ring>(std::move(ring)));
  }

  bool receive(std::int64_t next) override {
    if (!is_open_) return false;
    const std::int64_t ranks = shared_.stream.ranks;
    bool has_come = false;
    for (; answered_ < allowed_ && live_is_over(&receive_of(answered_)) != 0; has_come = true) {
      const auto& slot = *live_slot(ring.get(), answered_);
      if (slot.is_revoked == 0 && end_ < 0) set_counts(slot);  // the end has the last counts
      __atomic_store_n(live_word_of(ring.get(), answered_),
                       live_word(answered_, slot.is_revoked == 0 ? LIVE_FULL : LIVE_EMPTY), __ATOMIC_SEQ_CST);
      answered_ += ranks;
    }
    if (end_ >= 0 && answered_ >= end_) {
      for (auto& receive : receives_)
        if (receive != MPI_REQUEST_NULL) live_cancel(&receive);
      is_open_ = false;
      return true;
    }
    if (!ring) return has_come;
    // A slot is free when its last sample has been taken, and this rank has answered it.
    const auto may_come = std::min(next, answered_) + std::int64_t{LIVE_AHEAD} * ranks;
    if (allowed_ >= may_come) return has_come;
    for (; allowed_ < may_come; allowed_ += ranks)
      receive_of(allowed_) = live_receive_slot(live_slot(ring.get(), allowed_), ring->slot_bytes, rank_, tag_);
    tell();
    return true;
  }

  void serve(Receiver& receiver, const live_message& message) {
    if (message.kind == LIVE_FIELD && layout_.field_count < MUSTER_LIVE_MAX_FIELDS)
      layout_.fields[layout_.field_count++] = message.of.field;
    if (message.kind == LIVE_PARAMETER && layout_.parameter_count < MUSTER_LIVE_MAX_FIELDS)
      layout_.parameters[layout_.parameter_count++] = message.of.parameter;
    if (message.kind == LIVE_BEGIN) {
      // This rank uses LIVE_AHEAD of these slots; the system gives no memory for the others.
      live_ring head{};
      head.layout = layout_;
      head.told.next = -1;
      constexpr std::int64_t most = std::int64_t{1} << 48;
      live_place(&head, std::int64_t{LIVE_AHEAD} * shared_.stream.ranks, std::clamp<std::int64_t>(message.seq, 0, most),
                 shared_.stream.ranks);
      const auto memory = map_file<live_ring>(head.file_bytes, -1);
      if (memory) *memory = head;
      receiver.take_ring(*this, memory, head.file_bytes);
    }
    if (message.kind == LIVE_WANT) receiver.send_weights(*this);
    if (message.kind != LIVE_END) return;
    end_ = message.seq;
    if (ring) set_counts(message.of.end);
  }

 private:
  MPI_Request& receive_of(std::int64_t seq) {
    return receives_[static_cast<std::size_t>(seq / shared_.stream.ranks % LIVE_AHEAD)];
  }
  void set_counts(const live_sample& counts) {
    __atomic_store_n(&ring->sent, counts.sent, __ATOMIC_RELAXED);
    __atomic_store_n(&ring->waited_ms, std::max(ring->waited_ms, counts.waited_ms), __ATOMIC_RELAXED);
    __atomic_store_n(&ring->dropped, counts.dropped, __ATOMIC_RELEASE);
  }

  Shared& shared_;
  const int rank_, tag_;  ///< in MPI_COMM_WORLD, and of its channel
  bool is_open_ = true;
  live_layout layout_{};
  std::int64_t answered_, allowed_;  ///< before these samples all have come, or may come
  std::int64_t end_ = -1;            ///< the rank has ended, and answers no sample from this one on; -1: not yet
  std::array<MPI_Request, LIVE_AHEAD> receives_{};
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(Receiver& receiver) : receiver_(receiver), shared_{.stream = receiver.stream} {}
  MpiTransport(const MpiTransport&) = delete;
  ~MpiTransport() override {
    if (!shared_.sends.empty()) static_cast<void>(new auto(std::move(shared_.sends)));  // MPI may still read them
  }

  void start() override { shared_.channel.reset(live_channel_open(receiver_.stream.tag)); }
  bool must_be_polled() const noexcept override { return true; }

  bool serve(std::span<const pollfd>) override {
    bool has_served = false;
    live_message message{};
    for (int source = 0; live_channel_receive(shared_.channel.get(), &message, &source) != 0; has_served = true)
      if (message.kind == LIVE_HELLO)
        greet(message, source);
      else
        for (const auto& connection : connections_)
          if (connection->is_from(source, message.tag)) connection->serve(receiver_, message);
    std::erase_if(connections_, [](const auto& connection) { return !connection->is_open(); });
    std::erase_if(shared_.sends, [](auto& send) { return live_is_over(&send.first) != 0; });
    return has_served;
  }

 private:
  void greet(const live_message& message, int source) {
    const auto& hello = message.of.hello;
    const auto text = receiver_.reason_to_refuse(hello);
    live_message welcome{};
    welcome.kind = LIVE_WELCOME;
    text.copy(welcome.of.told.refusal, sizeof welcome.of.told.refusal - 1);
    live_channel_send(shared_.channel.get(), source, message.tag, welcome);
    if (!text.empty()) return;
    connections_.push_back(
        std::make_shared<MpiConnection>(shared_, source, message.tag, first_sample(receiver_.stream, hello.solver)));
    receiver_.add(hello, connections_.back());
  }

  Receiver& receiver_;
  Shared shared_;
  std::vector<std::shared_ptr<MpiConnection>> connections_;
};

}  // namespace

void announce(const Stream& stream, const std::vector<int>& world_ranks) {
  std::vector<std::byte> bytes(sizeof(live_announcement) + world_ranks.size() * sizeof(std::int32_t));
  auto* const announcement = reinterpret_cast<live_announcement*>(bytes.data());
  stream.name.copy(announcement->name, sizeof announcement->name - 1);
  announcement->tag = stream.tag;
  announcement->count = static_cast<std::int32_t>(world_ranks.size());
  std::ranges::copy(world_ranks, announcement->ranks);
  live_announce(announcement);
}

std::unique_ptr<Transport> mpi_transport(Receiver& receiver) { return std::make_unique<MpiTransport>(receiver); }

}  // namespace muster::detail::live
