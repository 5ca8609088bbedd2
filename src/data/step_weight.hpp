// How much this rank's gradient counts in the step that is under way.
#pragma once

#include <cstdint>

namespace muster::data {

/// Written by the batches of a split dataset, read by the gradient reducer.
struct StepWeight {
  std::int64_t local = 0;   ///< samples in this rank's batch
  std::int64_t global = 0;  ///< over all ranks; 0 while no batch is in hand: every rank counts the same

  /// This rank's share of the samples in units of an even one: exactly 1 where all ranks have as many, 0 for a ghost
  /// batch.
  double relative(int world) const noexcept {
    return global > 0 ? static_cast<double>(local) * world / static_cast<double>(global) : 1.0;
  }
};

}  // namespace muster::data
