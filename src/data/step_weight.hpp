// How a step is shared among the ranks, and how much this rank's gradient counts in the one that is under way.
#pragma once

#include <cstdint>

namespace muster::data {

/// The shards of a step that a rank takes: one of as many as there are ranks, or several with virtual workers.
struct StepShare {
  int total = 1;
  int first = 0;
  int count = 1;
  bool fixed = false;  ///< virtual workers: results must not depend on who takes which
};

/// Written by the batches of a split dataset, read by the gradient reducer.
struct StepWeight {
  std::int64_t local = 0;   ///< samples in the batch in hand
  std::int64_t global = 0;  ///< of the step, over all ranks; 0 while no batch is in hand: all count the same
  int shard = 0;            ///< which of the rank's shards of the step the batch is
  int shards = 1;
  std::int64_t batch = 0;  ///< counts the batches that there have been

  /// The batch's share of the samples in units of an even one: exactly 1 where all shards have as many, 0 for a ghost
  /// batch. `total`: shards of a step.
  double relative(int total) const noexcept {
    return global > 0 ? static_cast<double>(local) * total / static_cast<double>(global) : 1.0;
  }
  bool completes_step() const noexcept { return global == 0 || shard + 1 == shards; }
};

}  // namespace muster::data
