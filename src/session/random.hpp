// The random generators of a rank, and their states.
#pragma once

#include "base/export.hpp"
#include "step/batch_weight.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::session {

/// Seeds torch's generators from the seed, the rank and the number of reports so far. After enable_reproducibility()
/// they are seeded from its seed and the reports only, so alike on every rank.
void seed_generators(std::uint64_t seed, int rank, std::int64_t reports = 0);

/// The generators' state as bytes: the CPU's first, then that of `device` if it is a GPU. The same length on every
/// rank.
MUSTER_INTERNAL_API std::string generator_state(at::Device device);
/// Restores it. A state that was saved without `device` restores the CPU's only.
MUSTER_INTERNAL_API void set_generator_state(const std::string& state, at::Device device);

/// A random state for each micro-batch that a rank computes of a step, and one for the rank outside of micro-batches.
class MicroBatchGenerators {
 public:
  /// Seeds the states of this rank's micro-batches of the step. torch's generators keep their state.
  MicroBatchGenerators(std::uint64_t seed, const step::MicroBatchShare& share, at::Device device);

  /// Switches torch's generators to the state of a micro-batch (counted on this rank from 0), or of the rank (-1).
  void switch_to(int micro_batch);

  /// The states of all micro-batches of this rank, and then that of the rank, concatenated.
  std::string state();
  /// Restores them from `states`: the state() of each of the `saved_ranks` that saved. The state of the rank is
  /// restored only if there are as many `ranks` now. Changes nothing unless the states are of as many micro-batches.
  void restore(const std::string& states, int saved_ranks, int rank, int ranks);

 private:
  std::string& current() {
    return current_ < 0 ? rank_state_ : micro_batch_states_[static_cast<std::size_t>(current_)];
  }

  step::MicroBatchShare share_;
  at::Device device_;
  std::string rank_state_;
  std::vector<std::string> micro_batch_states_;
  int current_ = -1;  ///< index of the micro-batch, or -1 for the rank
};

}  // namespace muster::detail::session
