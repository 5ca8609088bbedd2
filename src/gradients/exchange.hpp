// The averaging of gradients: each rank adds each of its gradients once, waits for the other ranks, and fetches the
// averages.
//
//   exchange.begin(Arrival::in_backward, flags, weight);
//   for (…) exchange.add(i, gradient, ParameterUse::used);   // as backward() makes the gradients
//   exchange.finish();                                       // waits for the other ranks
//   exchange.fetch(i, gradient);
//
// There are five implementations: on CPUs, in node-shared memory and between nodes (shared_exchange.hpp); in buckets
// over a process group (bucket_exchange.hpp); for virtual workers (ordered_exchange.hpp); for sparse gradients
// (sparse_exchange.hpp); and for one rank alone (alone_exchange.hpp).
#pragma once

#include "gradients/flat_layout.hpp"
#include "muster/communicator.hpp"
#include "node/bucket_reduction.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::gradients {

inline constexpr const char* averaging = "averaging gradients";

/// Whether this rank's samples have used the parameter.
enum class ParameterUse : std::uint32_t {
  unused,
  used,
  abandoned,  ///< unknown: an exception has ended this rank's backward()
};

/// When gradients are added.
enum class Arrival {
  in_backward,  ///< one by one while backward() computes; finish() follows
  at_once,      ///< all one after the other, without computation between them
  /// As at_once, and finish() or FusableGradients::finish_with() follows: a fused optimizer may take the gradients.
  left,
  /// As in_backward, and FusableGradients::go_on() follows. A fused optimizer may take the gradients.
  left_in_backward,
};

/// Bits that each rank sends along with its gradients. After the round, every rank has the OR over all ranks.
using Flags = std::uint32_t;
constexpr int flag_bits = 7;
constexpr Flags stop_requested = 1;        ///< this rank is asked to stop
constexpr Flags gradients_changed = 2;     ///< gradients that backward() left to an optimizer were changed by hand
constexpr Flags gradients_weighted = 4;    ///< this rank's gradients are multiplied by a weight that the program gives
constexpr Flags gradients_unweighted = 8;  ///< this rank's gradients have no such weight
constexpr Flags gradients_stale = 16;      ///< gradients have changed since the exchange was given them
constexpr Flags averages_fetched = 32;     ///< gradients that were left to an optimizer are averaged without its step
constexpr Flags averages_stepped = 64;     ///< the optimizer steps with them

// Exchanges that can only sum numbers send uses, flags and weights as numbers beside the gradients. These functions
// turn them into summands, and the sums over the ranks back into values.
/// 1 if used, 0 if not; NaN if abandoned, so that the sum is NaN, too.
inline float summand_of(ParameterUse use) {
  return use == ParameterUse::abandoned ? std::numeric_limits<float>::quiet_NaN()
                                        : static_cast<float>(use == ParameterUse::used);
}
/// Turns the sum over the ranks into the result of Exchange::user_count().
inline int users_of(float sum) { return std::isnan(sum) ? -1 : static_cast<int>(sum); }

inline void put_flags(Flags flags, std::span<float> summands) {
  for (std::size_t bit = 0; bit < summands.size(); ++bit) summands[bit] = static_cast<float>(flags >> bit & 1);
}
/// True if the flags of all ranks contain both of two that exclude each other.
inline bool has_both(Flags flags, Flags one, Flags other) { return (flags & one) != 0 && (flags & other) != 0; }

inline Flags flags_of(std::span<const float> sums) {
  Flags flags = 0;
  for (std::size_t bit = 0; bit < sums.size(); ++bit) flags |= static_cast<Flags>(sums[bit] > 0) << bit;
  return flags;
}

// A weight is sent as the bits of a fixed-point number, one summand for each bit. So the sum over the ranks is exact in
// any type that sums integers exactly (bfloat16: up to 256 ranks).
constexpr int weight_bits = 160;
constexpr int weight_fraction_bits = 86;
constexpr int note_count = flag_bits + weight_bits;  ///< number of summands for the flags and the weight
constexpr int word_bits = 32;                        ///< and for the word of FusableGradients::set_check_word()

inline void put_weight(double weight, std::span<float> summands) {
  std::ranges::fill(summands, 0.0F);
  int exponent = 0;
  constexpr int digits = std::numeric_limits<double>::digits;
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(weight, &exponent), digits));
  for (int bit = 0; bit < digits; ++bit) {
    const int place = exponent - digits + bit + weight_fraction_bits;
    if ((mantissa >> bit & 1) != 0 && place >= 0 && place < weight_bits) summands[static_cast<std::size_t>(place)] = 1;
  }
}
inline double weight_of(std::span<const float> sums) {
  double weight = 0;
  for (std::size_t place = 0; place < sums.size(); ++place)
    weight += std::ldexp(sums[place], static_cast<int>(place) - weight_fraction_bits);
  return weight;
}

inline void put_notes(Flags flags, double weight, std::span<float> summands) {
  put_flags(flags, summands.first(flag_bits));
  put_weight(weight, summands.last(weight_bits));
}

/// The gradients of all ranks, in memory that this rank can read, for a fused optimizer (optim/fused_step.hpp). Over
/// several nodes: the averages, of which each node has a share.
class FusableGradients {
 public:
  using Chunk = node::BucketReduction::Chunk;
  /// What is done with the chunks of a round.
  struct ChunkStep {
    /// Gets the gradients of each rank; over several nodes, the averages of this node's share of the chunk.
    node::BucketReduction::OnChunk on_chunk;
    /// Over several nodes: returns the address of a chunk in this node's memory. on_chunk has written this node's share
    /// there, and the other nodes' shares are received there. Nothing is if it is empty or returns null, on all ranks
    /// alike.
    std::function<std::shared_ptr<std::byte>(const Chunk& chunk)> result = {};
  };

  virtual ~FusableGradients() = default;
  virtual const Communicator& communicator() const noexcept = 0;
  /// How parameters lie in buckets; a bucket is reduced as a whole.
  virtual const FlatLayout& layout() const noexcept = 0;
  /// The strides in which the other ranks see this rank's gradient: its parameter's current strides; for a small
  /// gradient, which is always copied, the strides that its parameter had when this exchange was made.
  virtual at::IntArrayRef strides(std::size_t index) const = 0;
  /// Number of chunks in all buckets together. In a round, one rank (over several nodes, one of each node) processes
  /// each chunk.
  virtual std::size_t chunk_count() const noexcept = 0;
  /// Over several nodes: the chunks that this rank processes, the same on each node.
  virtual std::vector<Chunk> own_chunks() const = 0;
  /// The sum of what on_chunk gets, divided by this, is the average.
  virtual int divisor() const noexcept = 0;
  /// True if Arrival::left_in_backward gains anything.
  virtual bool averages_early() const noexcept = 0;
  /// Call it in a round of Arrival::left_in_backward once every gradient was added. `valid`: true if the gradients, and
  /// the uses given with them, have not changed since. If that holds on all ranks, returns true, and the round goes on
  /// as if it had been begun by Arrival::left with these flags, and this check word. Else ends the round. In a round of
  /// Arrival::left, all of this holds with the flags and the word of its beginning. Collective.
  virtual bool go_on(bool valid, Flags flags, std::uint32_t word) = 0;
  /// Call it instead of Exchange::finish(), once or several times in a round. It calls on_chunk for the chunks and does
  /// not average: the gradients stay as they are. Over several nodes, on_chunk is not called if a rank has abandoned
  /// the round. Collective.
  virtual void finish_with(const ChunkStep& step) = 0;
  // The following are for a ChunkStep, and for the time after finish_with().
  /// See Exchange::user_count().
  virtual int user_count(std::size_t index) const = 0;
  /// See Exchange::flags().
  virtual Flags flags() const = 0;
  /// Sets a word that this rank sends along with its gradients. Call it between Exchange::begin() and the first add().
  virtual void set_check_word(std::uint32_t word) = 0;
  /// True if all ranks have set the same word.
  virtual bool all_words_equal() const = 0;
};

/// `index` is always a position in the list of parameters that the exchange was made for. In every round each rank adds
/// every gradient once, in any order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Begins a round; the previous round must be finished. `weight`: the weight that this rank's gradients were
  /// multiplied by; 0 if there is none.
  virtual void begin(Arrival arrival, Flags flags, double weight) = 0;
  /// Adds a gradient that is already multiplied by its weight; an undefined gradient counts as zero. The exchange may
  /// keep the gradient's memory and reduce it in place, so nobody else may read or write it until finish() has
  /// returned.
  virtual void add(std::size_t index, const at::Tensor& gradient, ParameterUse use) = 0;
  /// Waits until every rank has added every gradient, and averages them. Only stores the gradients if
  /// is_step_complete() is false afterwards. Collective.
  virtual void finish() = 0;
  /// False if gradients are only stored so far, since this rank's further rounds of the step must come before the
  /// average.
  virtual bool is_step_complete() const { return true; }
  /// True if an average may take several rounds. Then .grad must not hold the gradients of earlier rounds when a round
  /// adds to it.
  virtual bool takes_several_rounds() const noexcept { return false; }

  /// True if the exchange itself has a reference to the memory of the gradient that was added last.
  virtual bool holds(std::size_t) const noexcept { return false; }

  // The following are for the time after a round that is finished and completes a step.
  /// Returns how many ranks have used the parameter in the round; -1 if a rank has abandoned the round.
  virtual int user_count(std::size_t index) const = 0;
  /// Makes `gradient` hold the average, in place if it is defined.
  virtual void fetch(std::size_t index, at::Tensor& gradient) = 0;
  /// Returns the OR of all ranks' flags; an exchange without gradients may send nothing and return 0.
  virtual Flags flags() const = 0;
  /// Returns the sum of the weights given to begin(), over the number of ranks (or micro-batches, where these are
  /// averaged); an exchange without gradients may return 0.
  virtual double mean_weight() const = 0;

  /// Returns the interface for a fused optimizer; null if this exchange has none.
  virtual FusableGradients* fusable() noexcept { return nullptr; }

 protected:
  /// Makes `gradient` hold the average; for implementations of fetch().
  static void copy_or_assign(const at::Tensor& average, at::Tensor& gradient) {
    if (gradient.defined())
      gradient.copy_(average);
    else
      gradient = average.clone();
  }
};

}  // namespace muster::detail::gradients
