// The checks of `muster doctor`. look_at_…() finds out facts; it throws nothing, and what the system does not tell is
// null. check_…() judges facts and touches nothing. `root` is the folder in which proc, sys and dev are.
#pragma once

#include "base/host.hpp"
#include "muster/doctor.hpp"
#include "muster/json.hpp"

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace muster::detail::doctor {

using Findings = std::vector<Finding>;
/// Runs a program and returns its output; none (null) if it is not there, fails or takes too long.
using Run = std::function<Json(const std::vector<std::string>&)>;

/// {"library": "Open MPI v4.1.4", "mpirun": {"path": …, "version": "mpirun (Open MPI) 4.1.4"} or null, "srun": bool}
Json look_at_mpi(const std::string& library, const Environment& environment, const Run& run);
/// How MPI has started.
struct MpiStart {
  std::string launcher = {};  ///< as in Examination
  int ranks = 1;
  bool calls_from_threads = true;
  std::string problem = {};  ///< why MPI did not start or not as one world; empty if it did
  std::string remedy = {};
  bool may_pass = false;
};
Findings check_mpi(const Json& facts, const MpiStart& start);

/// {"host": …, "resolves": bool, "interfaces": [{"name": "eth0", "address": "10.0.0.1"}]}; the loopback is left out.
Json look_at_network();
Findings check_network(const Json& facts, int nodes);

/// {"muster", "libtorch": versions, "cuda": bool, "gpus": those that libtorch sees, "gpus_of_node", "hdf5": the version
/// that is loaded, "hdf5_built": that with which muster was compiled, "hdf5_parallel", "hdf5_thread_safe": bool}
Json look_at_libraries(const std::filesystem::path& root = "/");
Findings check_libraries(const Json& facts);

/// {"problem": why /dev/shm is unusable, or "", "free_bytes", "size_bytes", "shm_huge_pages", "huge_pages": "madvise",
/// "pagemap": bool, "single_copy": bool, "ptrace_scope": 1, "memory_bytes"}
Json look_at_memory(const std::filesystem::path& root = "/");
/// `ranks`: those of the node.
Findings check_memory(const Json& facts, int ranks);

/// {"cpus": those of the node, "model": …, "quota": CPUs that the control group grants, or null, "claims": cores that a
/// launch uses: [{"cpu": the first of the core, "process": or 0}]}
Json look_at_node_cores(const std::filesystem::path& root = "/");
/// {"mask": as cpu_mask() gives it, "bound_by": the variable of OpenMP that binds threads, or "", "launcher_cpus":
/// those of the launcher, "threads": OMP_NUM_THREADS, or 0}
Json look_at_rank_cores(const Environment& environment);
/// `ranks`: the facts of all ranks of the node.
Findings check_cores(const Json& node, const std::vector<Json>& ranks);

/// `path` itself if it exists, otherwise the nearest of its parents that does; absolute.
std::filesystem::path existing_parent(const std::filesystem::path& path);
/// Tries the file system of `path`, or of its nearest parent that exists, in a folder that is removed again:
/// {"wanted": `path` as an absolute one, "parent_exists": bool, "path": …, "type": "ext4", "free_bytes", "free_inodes":
/// or null, "problems": [{"doing", "error": errno, "text"}], "locks": bool, "direct": bool, "clock_ahead_s": of new
/// files before this node's clock, "write_bytes_per_s"}
Json look_at_storage(const std::filesystem::path& path);
Findings check_storage(const Json& facts);

/// {"config": {"KillWait": "30 sec", …} or null, "job": the same of this job, "in_job": bool, "end": SLURM_JOB_END_TIME
/// or null}; null if there is no Slurm.
Json look_at_slurm(const Environment& environment, const Run& run);
Findings check_slurm(const Json& facts, std::chrono::system_clock::time_point now);

/// The facts that should be the same on all nodes: [{"host": …, "libtorch": …, "clock_s": …}].
Findings check_differences(const std::vector<Json>& nodes);
/// Joins findings that differ only in their hosts or in numbers, and orders them: the worst first. Where the numbers
/// differ, the fact is that of the first host.
Findings merged(Findings findings);

/// to_mend or may_pass for the errno of a failed call.
Finding::Severity severity_of(int error);

}  // namespace muster::detail::doctor
