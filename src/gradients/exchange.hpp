// How gradients come together: every rank adds each of its gradients once, then finishes, then fetches the averages.
//
//   exchange.begin(Arrival::in_backward, note);
//   for (…) exchange.add(i, gradient, Use::used);   // as they are made
//   exchange.finish();                              // waits for the other ranks
//   exchange.fetch(i, gradient);
//
// There are four: through node-shared memory (shared_exchange.hpp), in buckets over a process group
// (bucket_exchange.hpp), that of virtual workers (ordered_exchange.hpp) and that of sparse gradients
// (sparse_exchange.hpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace muster::detail::gradients {

/// What a rank has to do with a gradient that it adds.
enum class Use : std::uint32_t {
  none,  ///< no sample of this rank has used the parameter
  used,
  left,  ///< the rank has left the pass by an exception
};

/// When gradients are added.
enum class Arrival {
  in_backward,  ///< one by one while backward() computes, then comes finish()
  at_once,
};

/// Bits that ride with a pass, at no message of their own: a rank gives some, and hears those that any rank has given.
using Note = std::uint32_t;
constexpr int note_bits = 4;

/// Indices are those of the parameters that it was made for. All ranks add the same ones in every pass, in any order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// A new pass; the one before is finished.
  virtual void begin(Arrival arrival, Note note) = 0;
  /// The gradient as it is to be averaged; one that is not defined counts as zero. Its memory may be kept and reduced
  /// in place from now on, so nobody else reads or writes it before finish() has returned.
  virtual void add(std::size_t index, const at::Tensor& gradient, Use use) = 0;
  /// Waits until every gradient of every rank is in. Collective.
  virtual void finish() = 0;
  /// False where the gradients are put aside, and more passes of this rank are needed before there is an average.
  virtual bool complete() const { return true; }

  // Of the pass that is finished and complete.
  /// On how many ranks the parameter was used; -1 where a rank has left the pass.
  virtual int users(std::size_t index) const = 0;
  /// Makes `gradient` hold the average, in place where it is defined.
  virtual void fetch(std::size_t index, at::Tensor& gradient) = 0;
  /// The notes of all ranks, joined by or. 0 from an exchange of no gradients, which sends nothing.
  virtual Note noted() const = 0;
};

}  // namespace muster::detail::gradients
