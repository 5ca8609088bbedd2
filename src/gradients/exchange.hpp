// How gradients come together: every rank adds each of its gradients once, then finishes, then fetches the averages.
//
//   exchange.begin(Arrival::in_backward, flags);
//   for (…) exchange.add(i, gradient, Use::used);   // as they are made
//   exchange.finish();                              // waits for the other ranks
//   exchange.fetch(i, gradient);
//
// There are four: through node-shared memory (shared_exchange.hpp), in buckets over a process group
// (bucket_exchange.hpp), that of virtual workers (ordered_exchange.hpp) and that of sparse gradients
// (sparse_exchange.hpp). One that shards the averages, by reduce-scatter and all-gather, would be a fifth.
#pragma once

#include "gradients/flat_layout.hpp"
#include "muster/communicator.hpp"
#include "node/bucket_reduction.hpp"

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace muster::detail::gradients {

/// Whether samples of this rank have used the parameter whose gradient it adds.
enum class Use : std::uint32_t {
  unused,
  used,
  abandoned,  ///< not known: an exception has ended this rank's backward()
};

/// When gradients are added.
enum class Arrival {
  in_backward,  ///< one by one while backward() computes, then comes finish()
  at_once,
};

/// Bits that go with a pass, at no message of their own: each rank sets some, and gets those that any rank has set.
using Flags = std::uint32_t;
constexpr int flag_bits = 4;
constexpr Flags stop_requested = 1;     ///< of this rank
constexpr Flags gradients_changed = 2;  ///< by hand, after backward() has left this rank's own to an optimizer

// Where gradients are summed, uses and flags go beside them as numbers, whose sums over the ranks tell what all have
// said.
inline float summand_of(Use use) {
  return use == Use::abandoned ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(use == Use::used);
}
/// As Exchange::users().
inline int users_of(float sum) { return std::isnan(sum) ? -1 : static_cast<int>(sum); }

inline void put_flags(Flags flags, std::span<float> summands) {
  for (std::size_t bit = 0; bit < summands.size(); ++bit) summands[bit] = static_cast<float>(flags >> bit & 1);
}
inline Flags flags_of(std::span<const float> sums) {
  Flags flags = 0;
  for (std::size_t bit = 0; bit < sums.size(); ++bit) flags |= static_cast<Flags>(sums[bit] > 0) << bit;
  return flags;
}

/// The gradients of all ranks in memory that this rank reads: for an optimizer that averages by itself
/// (optim/fused_step.hpp).
class FusableGradients {
 public:
  virtual ~FusableGradients() = default;
  virtual const Communicator& communicator() const noexcept = 0;
  /// A bucket is what is reduced as a whole.
  virtual const FlatLayout& layout() const noexcept = 0;
  /// The strides in which that gradient is given to the other ranks: those that its parameter has when it is added, or
  /// where it is copied, those that it had when this was made.
  virtual at::IntArrayRef strides(std::size_t index) const = 0;
  /// Of all buckets together; each is one rank's in a round.
  virtual std::size_t chunks() const noexcept = 0;
  /// In place of Exchange::finish(), with `on_chunk` in place of the average: the gradients stay as they are, and
  /// it may be called several times. Collective.
  virtual void finish_with(const node::BucketReduction::OnChunk& on_chunk) = 0;
  // In `on_chunk`, and after finish_with().
  /// As Exchange::users().
  virtual int users(std::size_t index) const = 0;
  /// As Exchange::flags().
  virtual Flags flags() const = 0;
  /// A word that travels with this rank's gradients; set between Exchange::begin() and the first add().
  virtual void set_word(std::uint32_t word) = 0;
  /// Whether all ranks have set the same.
  virtual bool words_agree() const = 0;
};

/// Indices are those of the parameters that it was made for. All ranks add the same ones in every pass, in any order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// A new pass; the one before is finished.
  virtual void begin(Arrival arrival, Flags flags) = 0;
  /// The gradient as it is to be averaged; one that is not defined counts as zero. Its memory may be kept and reduced
  /// in place from now on, so nobody else reads or writes it before finish() has returned.
  virtual void add(std::size_t index, const at::Tensor& gradient, Use use) = 0;
  /// Waits until every gradient of every rank is in. Collective.
  virtual void finish() = 0;
  /// False where the gradients are put aside, and more passes of this rank are needed before there is an average.
  virtual bool complete() const { return true; }
  /// Whether an average may take several passes: each adds its own gradients, without what was in .grad before.
  virtual bool adds_up() const noexcept { return false; }

  // Of the pass that is finished and complete.
  /// On how many ranks the parameter was used; -1 where a rank has abandoned the pass.
  virtual int users(std::size_t index) const = 0;
  /// Makes `gradient` hold the average, in place where it is defined.
  virtual void fetch(std::size_t index, at::Tensor& gradient) = 0;
  /// Those of all ranks, joined by or. 0 from an exchange of no gradients, which sends nothing.
  virtual Flags flags() const = 0;

  /// What it offers to an optimizer that averages by itself; null where it does not.
  virtual FusableGradients* fusable() noexcept { return nullptr; }

 protected:
  /// The end of fetch().
  static void hand_out(const at::Tensor& average, at::Tensor& gradient) {
    if (gradient.defined())
      gradient.copy_(average);
    else
      gradient = average.clone();
  }
};

}  // namespace muster::detail::gradients
