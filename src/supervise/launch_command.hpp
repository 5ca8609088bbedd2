// The command that starts the ranks, as a pure function of the options and the environment.
#pragma once

#include "muster/supervise.hpp"

#include <ctime>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::supervise {

using Hosts = std::set<std::string>;
using Environment = std::function<const char*(const char*)>;  ///< like std::getenv

struct LaunchCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> environment;  ///< added to this process's environment
};

/// The launcher to use.
struct Launcher {
  enum class Kind { mpirun, srun };
  Kind kind = Kind::mpirun;
  std::filesystem::path path;
};

/// The hosts of a job of PBS or LSF with their slots, "n1:2,n2:2": from the file that has a line for each slot.
std::string hosts_of_slots(const std::string& text);
/// Fills in the hosts of a PBS or LSF job of several hosts, or the slots of a job on this host, where none were given.
SuperviseOptions with_hosts_of_job(SuperviseOptions options, const Environment& environment);
/// Returns srun in a Slurm job of several nodes, otherwise mpirun.
Launcher::Kind launcher_kind(const SuperviseOptions& options, const Environment& environment);
/// The requested number of ranks; `cpus`: the number of CPUs on which this process may run.
int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cpus);
/// How many of `ranks` fit on the hosts that were not lost; all of them if no hosts are known.
int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment);
/// True if mpirun must log in to another host; `here` is the name of this one.
bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment);
/// Throws an Error (ExitCode::usage) for invalid options.
void check(const SuperviseOptions& options, int ranks, const Environment& environment);

/// What the ranks are told about their supervisor; see launch/supervised.hpp.
struct SupervisorInfo {
  std::string id = {}, started = {};
  std::time_t begin = 0;    ///< of the first start
  std::time_t job_end = 0;  ///< of the batch job, where the ranks do not know it from Slurm
  int full_worker_count = 0;
};

/// Folders for files that the launcher leaves behind when it is killed; on one node only, so that they can be removed.
struct Folders {
  std::filesystem::path temporary, shared_memory;  ///< shared_memory empty: the launcher chooses
};

/// `ranks` on all hosts but the lost ones. `flag_variables`: the names of variables that ranks on other hosts get.
LaunchCommand launch_command(const Launcher& launcher, const SuperviseOptions& options, int ranks, const Hosts& lost,
                             const SupervisorInfo& supervisor_info, const Folders& folders,
                             const Environment& environment, const std::vector<std::string>& flag_variables = {});

}  // namespace muster::detail::supervise
