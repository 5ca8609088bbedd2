// A job that is watched and started again: what `muster run` does.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster {

struct SuperviseOptions {
  std::vector<std::string> command = {};  ///< the program, searched in PATH if it has no slash, and its arguments
  /// Ranks; unless given, the tasks of the Slurm job, the slots of `hosts`, else the CPUs of this process.
  std::optional<int> ranks = {};
  std::string hosts = {};  ///< "n1,n2:4": with so many slots each, one unless given; this machine where empty
  /// Failures since the last progress after which the job is started again: 0 none, -1 no limit. FailureConfig's unless
  /// given. FailureConfig::max_failures says what progress is. A lost node, or SIGTERM to the
  /// ranks, is no failure of the program: FailureConfig::max_preemption_failures says how often.
  std::optional<int> max_failures = {};
  /// Fewer ranks where not as many can be had, but so many at least. A step keeps its number of samples: that of the
  /// checkpoint, else batch_size times all ranks. Unless given, the least of ScalingConfig::num_workers, else `ranks`.
  std::optional<int> min_workers = {};
  std::chrono::seconds grace{60};  ///< between the wish to stop and the end of ranks that do not heed it
  /// How long the ranks may wait for each other in Launch's constructor. Then the start counts as a failure.
  std::chrono::seconds start_limit{600};
};

/// Starts the program on its ranks by mpirun, or by srun in a Slurm job of several nodes, and starts it again from its
/// newest checkpoint where it fails in a way that trying again may help. Returns the exit code for main: the program's
/// own, or one of ExitCode. Ranks and whatever they have started end with the launcher, and that with this process.
///
/// SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP unless it is ignored (nohup), and a reader of standard output that has
/// gone ask the ranks to save and stop; the second SIGINT ends all at once with ExitCode::interrupted. A host of
/// `hosts` that cannot be reached is left out as one that was lost. What goes wrong is printed once. One call at a
/// time, in a process that has no other children.
int supervise(const SuperviseOptions& options);

}  // namespace muster
