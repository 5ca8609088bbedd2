// How a step is divided into micro-batches, and how much the gradient of each counts.
#pragma once

#include <cstdint>

namespace muster::detail::step {

/// The micro-batches of a step that a rank takes: one of as many as there are ranks, or several with virtual workers.
struct Share {
  int total = 1;
  int first = 0;
  int count = 1;
  bool fixed = false;  ///< virtual workers: results must not depend on who takes which
};

/// What a batch of a training pass is of its step. It stays with the batch.
struct BatchWeight {
  std::int64_t local = 0;   ///< samples in the batch
  std::int64_t global = 0;  ///< of the step, over all ranks; 0 where all ranks count the same
  int micro_batch = 0;      ///< which of the rank's micro-batches of the step it is
  int micro_batches = 1;
  std::int64_t number = 0;  ///< one more from batch to batch of a pass, different in each pass
  int total = 1;            ///< micro-batches of the step, over all ranks

  /// Its share of the samples in units of an even one: exactly 1 where all micro-batches have as many, 0 for padding.
  double relative() const noexcept {
    return global > 0 ? static_cast<double>(local) * total / static_cast<double>(global) : 1.0;
  }
  bool completes_step() const noexcept { return global == 0 || micro_batch + 1 == micro_batches; }
};

}  // namespace muster::detail::step
