// How a step is divided into micro-batches, and the weight of each micro-batch's gradient.
#pragma once

#include <cstdint>
#include <optional>

namespace muster::detail::step {

/// The micro-batches of a step that a rank processes: without virtual workers there is one per rank, with them a rank
/// may have several.
struct MicroBatchShare {
  int total = 1;       ///< micro-batches of the step, over all ranks
  int first = 0;       ///< number of the rank's first micro-batch
  int count = 1;       ///< how many micro-batches the rank processes
  bool fixed = false;  ///< with virtual workers: results must not depend on which rank processes which micro-batch
};

/// The weight of a batch of a training pass in its step. The batch and the pass share it (BatchWeightPtr).
struct BatchWeight {
  std::int64_t local = 0;   ///< samples in the batch
  std::int64_t global = 0;  ///< samples in the step, over all ranks; 0 if all ranks weigh the same
  int micro_batch = 0;      ///< index among the rank's micro-batches of the step
  int micro_batches = 1;    ///< the rank's micro-batches of the step
  std::int64_t number = 0;  ///< differs between passes; increases by one per batch of a pass; 0 with a user's sampler
  int total = 1;            ///< micro-batches of the step, over all ranks
  /// The weight that the program has given to the loss (Session::step); empty: the batch's samples are its weight.
  std::optional<double> given = {};

  /// The batch's samples relative to an even share: exactly 1 if all micro-batches have equally many, 0 for padding.
  double relative() const noexcept {
    return global > 0 ? static_cast<double>(local) * total / static_cast<double>(global) : 1.0;
  }
  bool completes_step() const noexcept { return global == 0 || micro_batch + 1 == micro_batches; }
};

}  // namespace muster::detail::step
