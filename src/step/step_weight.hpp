// How a step is shared among the ranks, and how much this rank's gradient counts in the one that is under way.
#pragma once

#include "muster/error.hpp"

#include <cstdint>
#include <string>

namespace muster::detail::step {

/// The shards of a step that a rank takes: one of as many as there are ranks, or several with virtual workers.
struct StepShare {
  int total = 1;
  int first = 0;
  int count = 1;
  bool fixed = false;  ///< virtual workers: results must not depend on who takes which
};

/// What a batch of a split dataset is of its step. That of the batch that counts is read by the gradient reducer.
struct StepWeight {
  std::int64_t local = 0;   ///< samples in the batch
  std::int64_t global = 0;  ///< of the step, over all ranks; 0 where no batch is in hand: all count the same
  int shard = 0;            ///< which of the rank's shards of the step the batch is
  int shards = 1;
  std::int64_t batch = 0;  ///< numbers the batches: those of one pass one after the other, all differently
  int total = 1;           ///< shards of the step, over all ranks
  /// Why it cannot be said which batch counts.
  std::string conflict = {};

  /// The batch's share of the samples in units of an even one: exactly 1 where all shards have as many, 0 for a ghost
  /// batch. `shards_of_step`: over all ranks. An Error where there is a conflict, the same on all ranks.
  double relative(int shards_of_step) const {
    if (!conflict.empty())
      throw Error(
          ExitCode::usage, "weighing a gradient by its batch's samples", conflict,
          "Say which batch counts: auto scope = session.step(batch); around backward() and the optimizer's step");
    return global > 0 ? static_cast<double>(local) * shards_of_step / static_cast<double>(global) : 1.0;
  }
  bool completes_step() const noexcept { return global == 0 || shard + 1 == shards; }
};

}  // namespace muster::detail::step
