// The options of a trainer, combined with the command line's flags, and with a value for what both leave open.
#pragma once

#include "base/export.hpp"
#include "muster/trainer.hpp"
#include "step/batch_weight.hpp"

#include <chrono>
#include <memory>

namespace muster::detail::run {

struct ResolvedOptions {
  const Launch& launch;                          ///< must not be used on a validation's thread, which may outlive it
  LaunchFlags flags = {};                        ///< Launch::flags()
  int cpus_per_rank = 1;                         ///< Launch::cpus_per_rank()
  TrainerOptions options;                        ///< the options with --config and --set applied
  std::shared_ptr<const BackendConfig> backend;  ///< null if there is no backend
  int worker_count = 1;        ///< the workers are the lowest ranks of the launch; the other ranks do not train
  int full_worker_count = 0;   ///< workers of a complete launch, with --min-workers or a range of workers; else 0
  int threads_per_worker = 1;  ///< torch threads of each worker
  std::chrono::milliseconds timeout{};      ///< how long ranks wait for each other
  Progress progress = Progress::automatic;  ///< how progress is shown
  std::int64_t first_epoch = 0;             ///< value of the field `epoch` in rows of the run's first epoch

  const Communicator& world() const noexcept { return launch.communicator(); }
  /// True if this rank is a worker.
  bool is_worker() const noexcept { return launch.rank() < worker_count; }
  /// Returns the part of each step that `worker` computes. Throws if virtual workers cannot be divided evenly.
  step::MicroBatchShare share_of(int worker) const;
};

/// Combines the trainer's options with the flags of the launch. Throws an Error if options are invalid, or if ranks
/// give different values to options that must be equal on all ranks. Collective over the launch.
MUSTER_INTERNAL_API ResolvedOptions resolve(const Launch& launch, const TrainerOptions& options,
                                            std::shared_ptr<const BackendConfig> backend);

}  // namespace muster::detail::run
