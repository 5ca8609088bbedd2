// The resolved options of a trainer: its options combined with the flags, with every default filled in.
#pragma once

#include "base/export.hpp"
#include "muster/trainer.hpp"
#include "step/batch_weight.hpp"

#include <chrono>
#include <memory>

namespace muster::detail::run {

struct ResolvedOptions {
  const Launch& launch;                          ///< not for the thread of a validation, which may outlive it
  LaunchFlags flags = {};                        ///< the launch's
  int cpus_per_rank = 1;                         ///< the launch's
  TrainerOptions options;                        ///< the configuration with --config and --set laid over it
  std::shared_ptr<const BackendConfig> backend;  ///< null for none
  int worker_count = 1;                          ///< they are the lowest ranks of the launch; the others do not train
  int full_worker_count = 0;                     ///< of a complete launch, with muster run --min-workers; otherwise 0
  int threads_per_worker = 1;                    ///< torch threads of each worker
  std::chrono::milliseconds timeout{};           ///< how long ranks wait for each other
  Progress progress = Progress::automatic;       ///< kind of progress output
  std::int64_t first_epoch = 0;                  ///< the `epoch` of the run's first report

  const Communicator& world() const noexcept { return launch.communicator(); }
  /// True if this rank is a worker.
  bool is_worker() const noexcept { return launch.rank() < worker_count; }
  /// The share of a step that worker number `worker` computes.
  step::MicroBatchShare share_of(int worker) const;
};

/// Returns the same on every rank. Throws an Error for options that are invalid. Collective over the launch.
MUSTER_INTERNAL_API ResolvedOptions resolve(const Launch& launch, const TrainerOptions& options,
                                            std::shared_ptr<const BackendConfig> backend);

}  // namespace muster::detail::run
