// A worker among the others: how they talk, what it computes on, what it takes of a step, its random generators.
#pragma once

#include "checkpoint/store.hpp"
#include "muster/communicator.hpp"
#include "step/batch_weight.hpp"
#include "train/random.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace muster::detail::train {

struct Workers {
  Communicator own;      ///< for the training function
  Communicator control;  ///< the same workers over another channel, for reports, checkpoints and stops
  at::Device device = at::kCPU;
  step::Share share = {};
  std::uint64_t seed = 0;
  std::optional<MicroBatchGenerators> generators = {};  ///< with virtual workers

  int rank() const noexcept { return own.rank(); }
  int size() const noexcept { return own.size(); }
  bool is_first() const noexcept { return rank() == 0; }

  void seed_generators() {
    train::seed_generators(seed, rank());
    if (share.fixed) generators.emplace(seed, share.first, share.count, device);
  }
  /// The random state of this worker, or of all of its micro-batches, for a checkpoint; and back, as far as the
  /// checkpoint has it, else seeded anew by the reports that there have been.
  std::string random_state() { return generators ? generators->state() : generator_state(device); }
  void restore_random_state(const checkpoint::Restored& saved, std::int64_t training_iteration) {
    if (!generators && saved.random_state)
      set_generator_state(*saved.random_state, device);
    else
      train::seed_generators(seed + static_cast<std::uint64_t>(training_iteration), rank());
    if (!generators) return;
    const auto size = generators->state_size();
    if (saved.random_states.size() == size * static_cast<std::size_t>(this->size()))
      generators->restore(saved.random_states.substr(size * static_cast<std::size_t>(rank()), size));
  }
};

}  // namespace muster::detail::train
