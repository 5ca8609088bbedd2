// What the launcher has given: one world of N ranks, as was meant, or N worlds of one rank each; and CPUs.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::launch {

using Environment = std::function<const char*(const char*)>;  ///< as std::getenv

/// N worlds of one rank.
struct SeparateWorlds {
  int task = 0;      ///< this process's number among those that the launcher says it started
  std::string fact;  ///< for the error text
  std::string remedy;
};

/// Before MPI is initialised: srun started several tasks and speaks no PMIx, in which case an Open MPI built as
/// Debian's is fails in MPI_Init. SLURM_NTASKS is not asked: it is set in a batch script's own process too.
std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment);

/// After it: MPI has one rank, the launcher started several processes.
std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size);

/// Whether srun started this process itself: then SIGTERM asks it to stop (scancel, the end of the allocation, a
/// preemption), and there are Slurm's KillWait seconds (30 unless set) before the kill. Under mpirun there are two, and
/// nothing can be done in them. Before MPI is initialised, which sets mpirun's variables too.
bool started_by_srun(const Environment& environment);

/// SLURM_JOB_END_TIME, unless it is over: that is an allocation of before, whose shell has been kept.
std::optional<std::chrono::system_clock::time_point> end_of_allocation(const Environment& environment,
                                                                       std::chrono::system_clock::time_point now);

/// masks[r][c] is '1' if local rank r may run on CPU c. The CPUs of `rank`, each divided by the ranks that share it;
/// at least 1.
int threads_for(const std::vector<std::string>& masks, int rank);

/// CPUs that the launcher itself (this process's parent) may run on: those of the node that the job has.
int launcher_cpus();

/// Whether `rank` is bound to less than its share of the node's `cpus`.
bool bound_below_share(const std::vector<std::string>& masks, int rank, int cpus);

/// This process's mask in that form.
std::string own_mask();

}  // namespace muster::detail::launch
