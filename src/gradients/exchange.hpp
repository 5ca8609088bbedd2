// The averaging of gradients: every rank adds each of its gradients once, then finishes, then fetches the averages.
//
//   exchange.begin(Arrival::in_backward, flags);
//   for (…) exchange.add(i, gradient, ParameterUse::used);   // as gradients are made
//   exchange.finish();                              // waits for the other ranks
//   exchange.fetch(i, gradient);
//
// There are four implementations: in node-shared memory (shared_exchange.hpp), in buckets over a process group
// (bucket_exchange.hpp), for virtual workers (ordered_exchange.hpp) and for sparse gradients (sparse_exchange.hpp).
// Averages sharded by reduce-scatter and all-gather would be a fifth.
#pragma once

#include "gradients/flat_layout.hpp"
#include "muster/communicator.hpp"
#include "node/bucket_reduction.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace muster::detail::gradients {

/// Says if samples of this rank have used the parameter whose gradient it adds.
enum class ParameterUse : std::uint32_t {
  unused,
  used,
  abandoned,  ///< unknown: an exception has ended this rank's backward()
};

/// When gradients are added.
enum class Arrival {
  in_backward,  ///< one by one while backward() computes; finish() follows
  at_once,      ///< all one after the other, without computation between them
};

/// Bits that travel with a round without a message of their own. Each rank sets some and gets the OR over all ranks.
using Flags = std::uint32_t;
constexpr int flag_bits = 4;
constexpr Flags stop_requested = 1;        ///< this rank is asked to stop
constexpr Flags gradients_changed = 2;     ///< gradients that backward() left to an optimizer were changed by hand
constexpr Flags gradients_weighted = 4;    ///< this rank's gradients are multiplied by a weight that the program gives
constexpr Flags gradients_unweighted = 8;  ///< they are not

// In exchanges that sum gradients, uses, flags and weights travel beside them as numbers, which are summed too. The
// sums tell what the ranks have said.
/// NaN if abandoned, so that the sum is NaN.
inline float summand_of(ParameterUse use) {
  return use == ParameterUse::abandoned ? std::numeric_limits<float>::quiet_NaN()
                                        : static_cast<float>(use == ParameterUse::used);
}
/// Returns the number that Exchange::user_count() returns.
inline int users_of(float sum) { return std::isnan(sum) ? -1 : static_cast<int>(sum); }

inline void put_flags(Flags flags, std::span<float> summands) {
  for (std::size_t bit = 0; bit < summands.size(); ++bit) summands[bit] = static_cast<float>(flags >> bit & 1);
}
inline Flags flags_of(std::span<const float> sums) {
  Flags flags = 0;
  for (std::size_t bit = 0; bit < sums.size(); ++bit) flags |= static_cast<Flags>(sums[bit] > 0) << bit;
  return flags;
}

// A weight travels as the bits of a fixed-point number: whatever the type in which they are summed, the sum of all
// ranks' weights is exact (in bfloat16 up to 256 ranks).
constexpr int weight_bits = 160;
constexpr int weight_fraction_bits = 86;
constexpr int note_count = flag_bits + weight_bits;  ///< numbers that flags and weight take together

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

/// The gradients of all ranks, in memory that this rank can read, for a fused optimizer (optim/fused_step.hpp).
class FusableGradients {
 public:
  virtual ~FusableGradients() = default;
  virtual const Communicator& communicator() const noexcept = 0;
  /// How parameters lie in buckets; a bucket is reduced as a whole.
  virtual const FlatLayout& layout() const noexcept = 0;
  /// The strides of that gradient as the other ranks see it. Normally those of its parameter when the gradient is
  /// added; for a gradient that is copied, those of the parameter when this exchange was made.
  virtual at::IntArrayRef strides(std::size_t index) const = 0;
  /// Number of chunks of all buckets. In a round, each chunk is processed by one rank.
  virtual std::size_t chunk_count() const noexcept = 0;
  /// Call it instead of Exchange::finish(), once or several times in a round. It calls `on_chunk` for the chunks and
  /// does not average: the gradients stay as they are. Collective.
  virtual void finish_with(const node::BucketReduction::OnChunk& on_chunk) = 0;
  // In `on_chunk`, and after finish_with().
  /// See Exchange::user_count().
  virtual int user_count(std::size_t index) const = 0;
  /// See Exchange::flags().
  virtual Flags flags() const = 0;
  /// Sets a word that travels with this rank's gradients. Call it between Exchange::begin() and the first add().
  virtual void set_check_word(std::uint32_t word) = 0;
  /// True if all ranks have set the same word.
  virtual bool all_words_equal() const = 0;
};

/// `index` is the index of a parameter in the list that the exchange was made for. In every round all ranks add all
/// gradients, in any order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Begins a round; the previous one must be finished. `weight`: see mean_weight(); 0 if there is none.
  virtual void begin(Arrival arrival, Flags flags, double weight) = 0;
  /// Adds a gradient, already weighted; an undefined one counts as zero. The exchange may keep its memory and reduce it
  /// in place, so nobody else may read or write it before finish() has returned.
  virtual void add(std::size_t index, const at::Tensor& gradient, ParameterUse use) = 0;
  /// Waits until every rank has added every gradient. Collective.
  virtual void finish() = 0;
  /// False if gradients are stored and this rank needs more rounds before there is an average.
  virtual bool is_step_complete() const { return true; }
  /// True if an average may take several rounds. Then the gradients of each round are added without earlier ones in
  /// .grad.
  virtual bool takes_several_rounds() const noexcept { return false; }

  // After a round that is finished and complete.
  /// Returns on how many ranks the parameter was used; -1 if a rank has abandoned the round.
  virtual int user_count(std::size_t index) const = 0;
  /// Makes `gradient` hold the average, in place if it is defined.
  virtual void fetch(std::size_t index, at::Tensor& gradient) = 0;
  /// Returns the flags of all ranks, joined by OR; 0 from an exchange without gradients, since it sends nothing.
  virtual Flags flags() const = 0;
  /// Returns the mean of the weights that the averaged gradients were multiplied by, over as many as were averaged; 0
  /// from an exchange without gradients.
  virtual double mean_weight() const = 0;

  /// Returns the interface for a fused optimizer; null if this exchange has none.
  virtual FusableGradients* fusable() noexcept { return nullptr; }

 protected:
  /// Last step of fetch().
  static void copy_or_assign(const at::Tensor& average, at::Tensor& gradient) {
    if (gradient.defined())
      gradient.copy_(average);
    else
      gradient = average.clone();
  }
};

}  // namespace muster::detail::gradients
