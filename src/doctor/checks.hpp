// The checks of `muster doctor`. A function look_at_…() finds out facts; it does not throw, and facts that the system
// does not tell are null. A function check_…() judges facts and touches nothing. `root` is the folder that contains
// proc, sys and dev.
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
/// Runs a program and returns its output; null if the program is not found, fails or takes too long.
using RunProgram = std::function<Json(const std::vector<std::string>&)>;

/// Returns {"library": "Open MPI v4.1.4", "mpirun": {"path": …, "version": "mpirun (Open MPI) 4.1.4"} or null, "srun":
/// bool}.
Json look_at_mpi(const std::string& library, const Environment& environment, const RunProgram& run);
/// How MPI has started.
struct MpiStart {
  std::string launcher = {};  ///< "mpirun", "srun" and others, as in Examination; empty without a launcher
  int ranks = 1;
  bool calls_from_threads = true;  ///< true if MPI gave MPI_THREAD_MULTIPLE
  std::string problem = {};        ///< why MPI has not started, or not as one world; empty if it has
  std::string remedy = {};
  bool may_pass = false;  ///< true if the problem is one of those that may pass by themselves
};
Findings check_mpi(const Json& facts, const MpiStart& start);

/// Returns {"host": …, "resolves": bool, "interfaces": [{"name": "eth0", "address": "10.0.0.1"}]}, without the
/// loopback.
Json look_at_network();
Findings check_network(const Json& facts, int nodes);

/// Returns {"muster", "libtorch": versions, "torch_threads": number, "cuda": bool, "gpus": how many libtorch sees,
/// "gpus_of_node", "hdf5": the version that is loaded, "hdf5_built": the version that muster was compiled with,
/// "hdf5_parallel", "hdf5_thread_safe": bool}.
Json look_at_libraries(const std::filesystem::path& root = "/");
Findings check_libraries(const Json& facts);

/// Returns {"problem": why /dev/shm cannot be used, or "", "free_bytes" and "size_bytes" of /dev/shm, "shm_huge_pages"
/// and "huge_pages": "madvise" or another setting, "pagemap": true if /proc/self/pagemap can be read, "single_copy":
/// true if process_vm_readv() works, "ptrace_scope": 1, "memory_bytes": the machine's memory}.
Json look_at_memory(const std::filesystem::path& root = "/");
/// `ranks`: number of ranks on the node.
Findings check_memory(const Json& facts, int ranks);

/// Returns {"cpus": number of the node's CPUs, "model": …, "quota": CPUs that the control group grants, or null,
/// "claims": cores that a launch uses, as [{"cpu": first CPU of the core, "process": its process, or 0}]}.
Json look_at_node_cores(const std::filesystem::path& root = "/");
/// Returns {"mask": this rank's launch::process_mask(), "bound_by": the variable by which OpenMP binds threads, or "",
/// "launcher_cpus": number of CPUs that the launcher may run on, "threads": OMP_NUM_THREADS, or 0}.
Json look_at_rank_cores(const Environment& environment);
/// `ranks`: the facts of each rank on the node.
Findings check_cores(const Json& node, const std::vector<Json>& ranks);

/// Returns `path` if it exists, otherwise the nearest of its parents that exists; an absolute path.
std::filesystem::path existing_parent(const std::filesystem::path& path);
/// Tries the file system of `path`, or of its nearest existing parent, in a temporary folder. Returns {"wanted": `path`
/// as an absolute path, "parent_exists": bool, "path": …, "type": "ext4", "free_bytes", "free_inodes": or null,
/// "problems": [{"doing", "error": errno, "text"}], "locks": bool, "direct": bool, "clock_ahead_s": by how much times
/// of new files are ahead of this node's clock, "write_bytes_per_s"}.
Json look_at_storage(const std::filesystem::path& path);
Findings check_storage(const Json& facts);

/// Returns {"config": Slurm's settings, {"KillWait": "30 sec", …}, or null, "job": this job's settings, or null,
/// "in_job": bool, "end": SLURM_JOB_END_TIME or null}; null outside of a job if scontrol gives no answer.
Json look_at_slurm(const Environment& environment, const RunProgram& run);
Findings check_slurm(const Json& facts, std::chrono::system_clock::time_point now);

/// Checks the facts that should be equal on all nodes. `nodes`: [{"host": …, "libtorch": …, "clock_s": …}].
Findings check_differences(const std::vector<Json>& nodes);
/// Joins findings that differ only in their hosts or in numbers, and all findings of one subject that are ok; sorts
/// them, the worst first. If the joined texts differ, the result has the text of the first host, after "on HOST".
Findings merged(Findings findings);

/// Returns may_pass if the errno of a failed call is one that may pass, such as a full disk; otherwise to_mend.
Finding::Severity severity_of(int error);

}  // namespace muster::detail::doctor
