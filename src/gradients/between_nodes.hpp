// The part of a round of gradients that crosses nodes. Each chunk belongs to one rank of every node, its leader. The
// leader sums the chunk over its node, in its own memory; the leaders exchange it from where it lies
// (comm/slice_exchange.hpp); and each leader writes the result to the other ranks of its node.
//
// Gradients that backward() has left to a fused optimizer are not overwritten. Each leader first gets the averages of
// its share of a chunk, in memory of its own. The round ends with a step, which updates the same share of other memory
// and gathers that, or with the averages, which are gathered into the gradients.
#pragma once

#include "comm/collectives.hpp"
#include "comm/slice_exchange.hpp"
#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "watch/trace.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace muster::detail::gradients {

/// What a fused optimizer does with the chunks of a round.
struct ChunkStep {
  /// Gets the gradients of each rank; over several nodes, the averages of this node's share of the chunk.
  node::BucketReduction::OnChunk on_chunk;
  /// Over several nodes: returns the address of a chunk in this node's memory. on_chunk has written this node's share
  /// there, and the other nodes' shares are received there. Nothing is if it is empty or returns null, on all ranks
  /// alike.
  std::function<std::shared_ptr<std::byte>(const node::BucketReduction::Chunk& chunk)> result = {};
};

class BetweenNodes {
 public:
  /// Returns what keeps the memory of a bucket alive.
  using Keep = std::function<std::shared_ptr<void>(std::size_t bucket)>;

  /// How chunks are made for these nodes.
  static node::Chunking chunking(const Communicator& communicator);

  /// The reduction's chunks are made by chunking(). `send_as`: the type of 16 bits in which wider real numbers are
  /// sent; their sum is formed in float and rounded once.
  BetweenNodes(Communicator communicator, node::BucketReduction& reduction, std::optional<at::ScalarType> send_as,
               Keep keep);

  /// Begins a round, after the reduction's begin(). `left`: true if the gradients were left to a fused optimizer.
  void begin(bool left);
  /// Ends a round of such gradients once more, after the reduction's next begin(); averages and notes stay as they are.
  void begin_again();
  /// Sums the round's notes over the ranks. Call it once in a round.
  void send(const Notes& notes);
  /// Advances the chunks that this rank leads, and never waits; true if any went on. MPI must allow it if another
  /// thread than that of send() calls it.
  bool advance();
  /// Calls advance(); true once notes() are known.
  bool knows_notes();
  /// Calls advance(); true once the round has ended on this node. `step`: what ends a round of gradients that were left
  /// to an optimizer; null for the averages. Such a round ends with neither if a rank has abandoned it, if gradients
  /// are stale, or if the ranks would end it in different ways.
  bool finish(const ChunkStep* step);

  /// The notes of all ranks, once they are known.
  const Notes& notes() const { return *notes_; }

 private:
  /// A chunk that this rank leads.
  struct Led {
    node::BucketReduction::Chunk chunk = {};
    std::vector<std::byte*> data = {};  ///< [ranks of the node]: the chunk's address
    /// For gradients that were left to an optimizer: the averages of this node's share.
    std::vector<std::byte> share = {};
    at::Tensor wide = {}, narrow = {};  ///< where values are sent in another type: the result, and what is sent
    std::shared_ptr<void> memory = {};  ///< keeps what is sent alive
    std::unique_ptr<comm::SliceExchange> exchange = {};  ///< null if none is under way
    watch::TraceEvent event = {};
  };
  /// How far the chunks have come: those from `finished` to `begun` are under way.
  struct Progress {
    std::size_t begun = 0, finished = 0;
  };

  bool ends_with_nothing() const;
  void start(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> data);
  void start_end(std::size_t position, const ChunkStep* step);
  void exchange(Led& led, std::size_t position, const comm::SliceExchange::Slice& slice,
                comm::SliceExchange::Reduce reduce, comm::SliceExchange::Halves halves);
  bool advance(Progress& progress, bool writes_results);
  void copy_to_node(const Led& led) const;
  node::Slice share_of(const node::BucketReduction::Chunk& chunk) const;
  std::byte* own(const Led& led) const {
    return led.data[static_cast<std::size_t>(communicator_.topology().local_rank)];
  }

  Communicator communicator_;
  node::BucketReduction& reduction_;
  std::optional<at::ScalarType> send_as_;
  Keep keep_;
  std::deque<Led> led_;           ///< in the order in which this rank processes them
  Progress exchanged_;            ///< of the chunks' first exchange, which is the only one unless gradients were left
  Progress ended_;                ///< of the end of a round of gradients that were left
  bool left_ = false;             ///< true if the round is of gradients that were left to an optimizer
  bool again_ = false;            ///< true if the round ends once more
  std::shared_ptr<Notes> notes_;  ///< null before send()
  comm::Request summed_;          ///< the all-reduce of notes_
};

}  // namespace muster::detail::gradients
