// The random generators of a rank, and their states.
#pragma once

#include "base/export.hpp"
#include "step/batch_weight.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::session {

/// Seeds torch's generators by the seed, the rank and the number of reports so far. After enable_reproducibility(),
/// they are seeded by its seed and the number of reports only, so all ranks have the same.
void seed_generators(std::uint64_t seed, int rank, std::int64_t reports = 0);

/// Returns the generators' states as bytes: of the CPU's generator, then of `device`'s if it is a GPU. Equally long on
/// all ranks.
MUSTER_INTERNAL_API std::string generator_state(at::Device device);
/// Restores generator_state(). If the state was saved without `device`, only the CPU's generator is restored.
MUSTER_INTERNAL_API void set_generator_state(const std::string& state, at::Device device);

/// A random state for each micro-batch that a rank computes in a step, and one for the rank outside of micro-batches.
class MicroBatchGenerators {
 public:
  /// Seeds the states of this rank's micro-batches. The present state of torch's generators becomes the rank's.
  MicroBatchGenerators(std::uint64_t seed, const step::MicroBatchShare& share, at::Device device);

  /// Switches torch's generators to the state of a micro-batch (counted on this rank from 0), or to the rank's (-1).
  void switch_to(int micro_batch);

  /// Returns the states of this rank's micro-batches, and then the rank's own state, concatenated.
  std::string state();
  /// Restores the states. `states`: state() of each of the `saved_ranks` ranks that have saved, concatenated. The
  /// rank's own state is restored only if saved_ranks == `ranks`, the present number. Restores nothing if the number of
  /// micro-batches has changed.
  void restore(const std::string& states, int saved_ranks, int rank, int ranks);

 private:
  std::string& current() {
    return current_ < 0 ? rank_state_ : micro_batch_states_[static_cast<std::size_t>(current_)];
  }

  step::MicroBatchShare share_;
  at::Device device_;
  std::string rank_state_;
  std::vector<std::string> micro_batch_states_;
  int current_ = -1;  ///< index of the micro-batch whose state torch's generators have; -1 for the rank's
};

}  // namespace muster::detail::session
