// What a trainer is asked for, with everything decided that its options and the flags leave open.
#pragma once

#include "muster/trainer.hpp"
#include "step/batch_weight.hpp"

#include <chrono>
#include <memory>

namespace muster::detail::train {

struct Plan {
  const Launch& launch;
  TrainerOptions options;                        ///< the configuration with --config and --set laid over it
  std::shared_ptr<const BackendConfig> backend;  ///< null for none
  int workers = 1;                               ///< they are the lowest ranks of the launch; the others wait
  int full_workers = 0;                          ///< where fewer may go on (muster run --min-workers): all of them
  int threads = 1;                               ///< of torch, on each worker
  std::chrono::milliseconds wait_limit{};        ///< of every wait of ranks for each other
  Progress progress = Progress::automatic;       ///< what a person sees
  std::int64_t first_epoch = 0;                  ///< the `epoch` of the first row

  const Communicator& world() const noexcept { return launch.communicator(); }
  /// Whether this rank is a worker.
  bool works() const noexcept { return launch.rank() < workers; }
  /// What that worker takes of a step.
  step::Share share(int worker) const;
};

/// The same on every rank. An Error for what cannot be. Collective over the launch.
Plan resolve(const Launch& launch, const TrainerOptions& options, std::shared_ptr<const BackendConfig> backend);

}  // namespace muster::detail::train
