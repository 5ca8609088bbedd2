// Finds out what the launcher (mpirun, srun) has set up: one world of N ranks or, by mistake, N worlds of one rank
// each; and the CPUs of each rank.
#pragma once

#include "base/export.hpp"
#include "base/host.hpp"

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::launch {

/// The launcher that has started this process.
struct StartedBy {
  std::string launcher;  ///< such as "mpirun"
  int processes = 1;
  int number = 0;             ///< this process's number, from 0
  std::string variable = {};  ///< the environment variable that has `processes`
};
/// Finds the launcher by its environment variables; empty if there is none. Knows mpirun of Open MPI, Hydra (MPICH,
/// Intel MPI), MVAPICH, PALS (HPE), jsrun (IBM), Flux and srun. An srun of one task without PMIx does not count, since
/// it may have started a shell.
MUSTER_INTERNAL_API std::optional<StartedBy> started_by(const Environment& environment);

/// True on the process that acts for all ranks before MPI is initialised: the launcher's first process, or the only
/// one.
bool is_first_process(const Environment& environment);

/// "RANK PID HOST" of this process if PMI_RANK is set and SLURM_PROCID is not: Hydra reports a lost rank by its process
/// id. Otherwise empty.
std::string process_for_launcher(const Environment& environment);

// Misleading variables come from a launcher that has not started this process as a rank: a shell has kept them from a
// job that is over, or they come from an srun --pty shell, or from the mpirun -n 1 that has started `muster run`. MPI
// would look for that launcher and fail.

/// The variables in `names` that mislead MPI: those of a launcher that does not answer; with Open MPI also those of
/// srun if this process is srun's only task and does not use PMI. `answers`: see server_answers().
std::vector<std::string> misleading_variables(const std::vector<std::string>& names, const Environment& environment,
                                              const std::string& mpi_library,
                                              const std::function<bool(const std::string& uri)>& answers);
/// False if the server of PMIx at "NAMESPACE;tcp4://127.0.0.1:4711" refuses connections.
bool server_answers(const std::string& uri);
/// Removes the misleading variables from this process's environment. `even_own`: also removes the variables of a
/// launcher that has started this process as its only one; for a process that starts a launcher itself. Call it before
/// threads are started.
MUSTER_INTERNAL_API void forget_other_launchers(const std::string& mpi_library, bool even_own = false);

/// The program that starts ranks of that MPI: "mpirun", or "mpiexec.hydra" for MPICH, Intel MPI and MVAPICH, since
/// mpirun and mpiexec may belong to another MPI of the machine. `mpi_library`: see comm::mpi_library().
MUSTER_INTERNAL_API std::string launcher_of(const std::string& mpi_library);
/// The plugin of srun by which its tasks find each other with that MPI, as in srun --mpi=pmix.
MUSTER_INTERNAL_API std::string srun_plugin(const std::string& mpi_library);

/// The error that the launcher has started N worlds of one rank.
struct SeparateWorlds {
  /// True if this process prints the error: the launcher's first process, or a process whose variables come from
  /// another job.
  bool is_printed_here = true;
  std::string fact;  ///< for the error text
  std::string remedy;
};

/// Call it before MPI is initialised. Returns the error if srun started several tasks without PMIx and the program uses
/// Open MPI, which would then fail in MPI_Init. Other MPIs understand PMI2 as well. SLURM_NTASKS is not used, since it
/// is also set in a batch script's own process. `mpi_library`: see comm::mpi_library().
MUSTER_INTERNAL_API std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment,
                                                                    const std::string& mpi_library);

/// Call it after MPI is initialised. Returns the error if MPI has one rank although the launcher started several
/// processes.
MUSTER_INTERNAL_API std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size,
                                                                  const std::string& mpi_library);

/// True if srun started this process, and not Open MPI's mpirun or Hydra, whose daemons srun may have started. Then
/// SIGTERM is a request to stop (scancel, the end of the allocation, a preemption), and Slurm kills the process
/// KillWait seconds later (30 by default). mpirun leaves two seconds, and Hydra ends the ranks when its daemons have
/// ended: too short to do anything. Call it before MPI is initialised, which sets mpirun's variables too.
bool started_by_srun(const Environment& environment);

/// masks[r][c] is '1' if local rank r may run on CPU c. Returns the number of CPUs of `rank`, rounded down, where a CPU
/// that n ranks share counts as 1/n; but at most its equal part of the `quota`, the number of CPUs that a control group
/// grants the node's ranks together, and at least 1.
MUSTER_INTERNAL_API int threads_for(const std::vector<std::string>& masks, int rank,
                                    double quota = std::numeric_limits<double>::infinity());

/// The number of CPUs that the launcher (this process's parent) may run on: the node's CPUs that belong to the job.
MUSTER_INTERNAL_API int launcher_cpus();

/// True if `rank` is bound to fewer CPUs than its equal share of `cpus`, the number of the node's CPUs.
MUSTER_INTERNAL_API bool bound_below_share(const std::vector<std::string>& masks, int rank, int cpus);

}  // namespace muster::detail::launch
