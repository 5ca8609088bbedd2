// A supervised job, as `muster run` starts it: the job is watched, and started again after a failure.
#pragma once

#include <muster/detail/export.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster {

struct SuperviseOptions {
  /// The program, searched in PATH if it has no slash, and its arguments. Or several programs with the ranks of each,
  /// as in `-n 6 ./heat : -n 2 ./train`: `ranks` and `min_workers` are then empty, and each start has all these ranks.
  std::vector<std::string> command = {};
  /// The number of ranks. Empty: the slots of `hosts` or of a PBS or LSF job; or the tasks of the Slurm job or, if it
  /// has several nodes and no number of tasks, as many as its CPUs suffice for; or else the cores of this process. The
  /// spares are subtracted.
  std::optional<int> ranks = {};
  std::string hosts =
      {};  ///< "n1,n2:4": n1 with one slot and n2 with four; empty: the hosts of the job, or this machine
  /// How many failures since the last progress are each followed by another start: 0 none, -1 no limit; empty:
  /// FailureConfig::max_failures, which also says what progress is. A lost node, or SIGTERM to the ranks, is no failure
  /// of the program: FailureConfig::max_preemption_failures limits such ends.
  std::optional<int> max_failures = {};
  /// The least number of ranks with which the job is started if not all are available; empty: the least of
  /// ScalingConfig::num_workers, or else `ranks`. The number of samples per step stays the same: that of the
  /// checkpoint, or else batch_size times all ranks.
  std::optional<int> min_workers = {};
  /// This many slots are kept free for the ranks of a host that is lost, so that the job goes on with as many ranks as
  /// before. By default, `ranks` is then the number of the other slots.
  int spares = 0;
  /// Puts the Slurm job into the queue again when its ranks have saved and stopped (ExitCode::stopped) at the end of
  /// its time: after SIGUSR1, or without a signal in the last tenth of its time; and when it has lost a node and too
  /// few are left for `min_workers`.
  bool requeue = false;
  /// How long ranks that were asked to stop may go on. Then they are killed.
  std::chrono::milliseconds grace = std::chrono::seconds(60);
  /// How long the ranks may wait for each other in Launch's constructor. Then the start counts as a failure.
  std::chrono::milliseconds start_limit = std::chrono::seconds(600);
};

/// Starts the program on its ranks with mpirun, with srun in a Slurm job of several nodes, or with flux run in a Flux
/// instance. If it fails in a way that may not repeat, starts it again from its newest checkpoint. Returns the exit
/// code for main: the program's own, or one of ExitCode. The ranks and all processes that they have started end with
/// the launcher, and the launcher ends with this process; only under Flux ranks go on when this process is killed.
///
/// The ranks are asked to save and stop by SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP unless it is ignored (nohup), and
/// when the reader of standard output has gone. A second SIGINT ends everything at once with ExitCode::interrupted. A
/// host of `hosts` that cannot be reached is left out like a lost one. After a failure, `hosts` are asked (ssh HOST
/// echo), since not every launcher names the lost host. Lost hosts are asked from time to time whether they answer
/// again; then the ranks save their state, and all start again. A node that Slurm has drained is left out at the next
/// start. Each problem is printed once. Only one call at a time, in a process that has no other children.
MUSTER_API int supervise(const SuperviseOptions& options);

}  // namespace muster
