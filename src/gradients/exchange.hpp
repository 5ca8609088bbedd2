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

#include "gradients/notes.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace muster::detail::gradients {

inline constexpr const char* averaging = "averaging gradients";

/// When gradients are added.
enum class Arrival {
  in_backward,  ///< one by one while backward() computes; finish() follows
  at_once,      ///< all one after the other, without computation between them
  /// As at_once, and finish() or SharedExchange::finish_with() follows: a fused optimizer may take the gradients.
  left,
  /// As in_backward, and SharedExchange::go_on() follows. A fused optimizer may take the gradients.
  left_in_backward,
};

class SharedExchange;

/// `index` is always a position in the list of parameters that the exchange was made for. In every round each rank adds
/// every gradient once, in any order.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Begins a round; the previous round must be finished. `weight`: the weight that this rank's gradients were
  /// multiplied by; 0 if there is none.
  void begin(Arrival arrival, Flags flags, double weight) {
    arrival_ = arrival;
    arrived_.clear();
    notes_.begin(flags, weight);
    begin_round();
  }
  /// Adds a gradient that is already multiplied by its weight; an undefined gradient counts as zero. The exchange may
  /// keep the gradient's memory and reduce it in place, so nobody else may read or write it until finish() has
  /// returned. If it throws, the gradient was not added.
  void add(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
    notes_.set_use(index, use);
    add_gradient(index, gradient, use);
  }
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
  virtual int user_count(std::size_t index) const { return notes_.user_count(index); }
  /// Makes `gradient` hold the average, in place if it is defined.
  virtual void fetch(std::size_t index, at::Tensor& gradient) = 0;
  /// Returns the OR of all ranks' flags; an exchange without gradients may send nothing and return 0.
  virtual Flags flags() const { return notes_.flags(); }
  /// Returns the sum of the weights given to begin(), over the number of ranks (or micro-batches, where these are
  /// averaged); an exchange without gradients may return 0.
  virtual double mean_weight() const { return notes_.weight() / summands_; }

  /// Returns this exchange if its gradients are for a fused optimizer, too; else null.
  virtual SharedExchange* fusable() noexcept { return nullptr; }

 protected:
  /// `gradients`: their number. `summands`: the number of ranks or micro-batches.
  Exchange(std::size_t gradients, int summands) : notes_(gradients), summands_(summands) {}

  virtual void begin_round() = 0;
  virtual void add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) = 0;

  /// Makes `gradient` hold the average; for implementations of fetch().
  static void copy_or_assign(const at::Tensor& average, at::Tensor& gradient) {
    if (gradient.defined())
      gradient.copy_(average);
    else
      gradient = average.clone();
  }
  /// Notes that backward() has made a gradient.
  void note_arrival(std::size_t index, ParameterUse use) {
    if (!order_known_ && use != ParameterUse::abandoned) arrived_.push_back(static_cast<std::int64_t>(index));
  }
  /// Returns the order in which the first rank has added gradients, in the first backward() in which it has added all
  /// of them; in other rounds, nothing. `broadcast`: overwrites the indices by the first rank's. Call it at the end of
  /// a round. Collective.
  std::vector<std::int64_t> find_order(const std::function<void(std::vector<std::int64_t>& order)>& broadcast);

  Notes notes_;  ///< this rank's; if the exchange sums them here, those of all ranks after finish()
  Arrival arrival_ = Arrival::at_once;

 private:
  int summands_;
  std::vector<std::int64_t> arrived_;  ///< the gradients that backward() has made in this round, in this order
  bool order_known_ = false;           ///< true if find_order() has returned it
};

}  // namespace muster::detail::gradients
