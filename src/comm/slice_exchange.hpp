// The transport between nodes: the leaders of a slice, one rank on each node, reduce it together.
//
// It needs an MPI communicator and the leaders' ranks, and nothing else of this room: no channel, no world, no
// placement. Whoever waits calls advance() again and again.
#pragma once

#include "node/kernels.hpp"
#include "node/slice.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::comm {

class MpiCommunicator;

/// The ranks, one on each node, that lead the same slice of every array.
struct Leaders {
  MpiCommunicator* communicator = nullptr;
  std::vector<int> ranks = {};  ///< [nodes]: the leader on each node, as a rank of the communicator
  int node = 0;                 ///< the node of this leader

  int nodes() const noexcept { return static_cast<int>(ranks.size()); }
  /// Returns the share of node `of` in a slice of `count` elements.
  node::Slice share(std::size_t count, node::Dtype type, int of) const {
    return node::slice_of(count, nodes(), of, type);
  }
  node::Slice own_share(std::size_t count, node::Dtype type) const { return share(count, type, node); }
};

/// Bytes of the slices into which a long array is cut, so that network and memory work at the same time. The leaders of
/// a node together exchange 1 MB at once: with more, the messages of the second exchange wait behind those of the first
/// (4 MB take 1.3 times as long on a link of 1 Gbit/s). No slice is shorter than 256 KB, and no message than 64 KB.
std::size_t slice_bytes(int nodes, int leaders) noexcept;

/// How often a poll calls MPI, at most: Open MPI polls its sockets only in every eighth call that advances operations.
inline constexpr int calls_per_poll = 8;

/// An all-reduce of one slice over the nodes, or one half of it. Each leader reduces its share of the slice, and sends
/// the result to the others; in a whole all-reduce, a short slice is reduced whole by every leader. Sums are formed in
/// the order of nodes, so all leaders get the same bits. With many nodes n, short slices reach all nodes in ⌈log₂ n⌉
/// rounds: in a round, a leader that has k slices sends them to the leader k nodes before it, and receives k slices
/// from the leader k nodes after it (fewer in the last round).
class SliceExchange {
 public:
  /// Reduces this leader's share, a part of the slice, and writes the result. summands[n]: the address of the share in
  /// the slice of node n.
  using Reduce = std::function<void(const node::Slice& share, std::span<const void* const> summands)>;
  struct Slice {
    const std::byte* summand = nullptr;  ///< this node's elements
    std::byte* result = nullptr;         ///< may be the summand
    std::size_t count = 0;               ///< elements
    node::Dtype type = node::Dtype::f32;
  };
  /// Which halves of the all-reduce take place.
  enum class Halves {
    both,
    reduce,  ///< each leader reduces its share; Slice::result is not used
    gather,  ///< each leader's share of the result is there already; Slice::summand and the Reduce are not used
  };
  /// Returns the Reduce that writes scaled sums to the slice's result.
  static Reduce sum_of(const Slice& slice, const node::Reduction& reduction);

  /// Starts the exchange. `number`: distinguishes the exchanges of these leaders that are under way at the same time;
  /// the same on all of them, below `numbers`. `lifetime` keeps the slice's memory alive while MPI may use it.
  SliceExchange(const Leaders& leaders, unsigned number, const Slice& slice, Reduce reduce,
                std::shared_ptr<void> lifetime, Halves halves = Halves::both);
  /// An exchange that has not finished is abandoned: MPI may use its memory until the communicator is cleaned.
  ~SliceExchange();
  SliceExchange(const SliceExchange&) = delete;
  SliceExchange& operator=(const SliceExchange&) = delete;

  static constexpr unsigned numbers = 16'000;

  /// Goes on as far as possible without waiting; true once the exchange has finished. `calls`: how often it may test
  /// each message.
  bool advance(int calls = calls_per_poll);
  /// Waits until one of its messages has come or gone, for a program that has nothing else to do.
  void wait();

 private:
  struct Memory;
  enum class State { scattering, gathering, done };

  node::Slice share_of(int node) const;
  std::size_t bytes() const noexcept { return slice_.count * node::size_of(slice_.type); }
  void scatter();
  void begin_rounds();
  void start_round();
  bool next_round();
  void reduce_share();
  void gather();
  bool test(int calls);
  void send(const std::byte* data, std::size_t count, int node, int tag);
  void receive(std::byte* data, std::size_t count, int node, int tag);

  const Leaders& leaders_;
  const int tag_;
  const Slice slice_;
  const Reduce reduce_;
  const Halves halves_;
  const bool whole_;      ///< true if every leader reduces the whole slice: one exchange instead of two
  const bool in_rounds_;  ///< true if a whole slice goes in rounds
  int known_slices_ = 1;  ///< in rounds: how many slices this leader has: those of its node and the nodes after it
  State state_ = State::scattering;
  const std::shared_ptr<Memory> memory_;  ///< used by MPI
};

}  // namespace muster::detail::comm
