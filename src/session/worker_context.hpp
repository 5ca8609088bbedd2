#pragma once

#include "checkpoint/store.hpp"
#include "muster/communicator.hpp"
#include "session/random.hpp"
#include "step/steps.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace muster::detail::session {

/// This worker among all workers: its communicators, its device, its part of a step, its random generators.
struct WorkerContext {
  Communicator communicator;  ///< for the training function's use
  Communicator control;       ///< the same workers, for muster's reports, checkpoints and stops
  at::Device device = at::kCPU;
  step::MicroBatchShare share = {};
  int full_worker_count = 0;  ///< see ResolvedOptions::full_worker_count; 0 with virtual workers
  std::uint64_t seed = 0;
  std::optional<MicroBatchGenerators> generators = {};  ///< only with virtual workers

  int rank() const noexcept { return communicator.rank(); }
  int size() const noexcept { return communicator.size(); }
  bool is_first() const noexcept { return rank() == 0; }

  void seed_generators() {
    session::seed_generators(seed, rank());
    if (share.fixed) generators.emplace(seed, share, device);
  }
  /// Returns the random state of this worker, for a checkpoint; with virtual workers, also of its micro-batches.
  std::string random_state() { return generators ? generators->state() : generator_state(device); }
  /// Restores the random state; with virtual workers, also of the micro-batches. If the checkpoint does not have this
  /// worker's own state, seeds torch's generators by the seed and the number of reports.
  void restore_random_state(const checkpoint::RestoredCheckpoint& saved, std::int64_t training_iteration) {
    if (!generators && saved.random_state)
      set_generator_state(*saved.random_state, device);
    else
      session::seed_generators(seed, rank(), training_iteration);
    if (generators) generators->restore(saved.random_states, saved.world_size, rank(), size());
  }
};

}  // namespace muster::detail::session
