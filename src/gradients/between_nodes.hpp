// The part of a round of gradients that crosses nodes. Each chunk belongs to one rank of every node, its leader. The
// leader sums the chunk over its node, in its own memory; the leaders exchange it from where it lies
// (comm/slice_exchange.hpp); and each leader writes the result to the other ranks of its node.
#pragma once

#include "comm/collectives.hpp"
#include "comm/slice_exchange.hpp"
#include "gradients/exchange.hpp"
#include "node/bucket_reduction.hpp"
#include "watch/trace.hpp"

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace muster::detail::gradients {

class BetweenNodes {
 public:
  /// Returns what keeps the memory of a bucket alive.
  using Keep = std::function<std::shared_ptr<void>(std::size_t bucket)>;

  /// How chunks are made for these nodes.
  static node::Chunking chunking(const Communicator& communicator);

  /// The reduction's chunks are made by chunking(). `parameters`: their number. `send_as`: the type of 16 bits in which
  /// wider real numbers are sent; their sum is formed in float and rounded once.
  BetweenNodes(Communicator communicator, node::BucketReduction& reduction, std::size_t parameters,
               std::optional<at::ScalarType> send_as, Keep keep);

  /// Begins a round, after the reduction's begin().
  void begin(Flags flags, double weight);
  /// Notes a gradient's use. Once it has been called for every gradient, the uses, the flags and the weights are summed
  /// over the ranks.
  void note(std::size_t index, ParameterUse use);
  /// Advances the chunks that this rank leads, and never waits; true if any went on. MPI must allow it if another
  /// thread than that of note() calls it.
  bool advance();
  /// Calls advance(); true once the round has ended on this node.
  bool finish();

  // The following are for the time after finish() has returned true.
  int user_count(std::size_t index) const { return users_of((*notes_)[index]); }
  Flags flags() const { return flags_of(std::span(*notes_).last(note_count).first(flag_bits)); }
  double weight_sum() const { return weight_of(std::span(*notes_).last(weight_bits)); }

 private:
  /// A chunk whose exchange has been started.
  struct UnderWay {
    std::vector<std::byte*> data;  ///< [ranks of the node]: the chunk's address
    std::size_t bytes;             ///< of the chunk
    at::Tensor wide, narrow;       ///< where values are sent in another type: this rank's elements, and what is sent
    std::shared_ptr<void> memory;  ///< keeps what is sent alive
    std::unique_ptr<comm::SliceExchange> exchange;  ///< null once it has finished
    watch::TraceEvent event;
  };
  void start(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> data);

  Communicator communicator_;
  node::BucketReduction& reduction_;
  std::optional<at::ScalarType> send_as_;
  Keep keep_;
  std::deque<UnderWay> under_way_;             ///< in the order in which they were started
  std::shared_ptr<std::vector<float>> notes_;  ///< [parameters + note_count]
  std::size_t missing_ = 0;                    ///< number of gradients that note() has yet to be called for
  comm::Request summed_;                       ///< the all-reduce of notes_
};

}  // namespace muster::detail::gradients
