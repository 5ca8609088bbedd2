// The command that starts the ranks, as a pure function of the options and the environment.
#pragma once

#include "muster/supervise.hpp"
#include "supervise/launchers/launchers.hpp"

#include <chrono>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::supervise {

/// The hosts of a job of PBS or LSF with their slots, "n1:2,n2:2": from the file that has a line for each slot.
std::string hosts_of_slots(const std::string& text);
/// Fills in the hosts of a PBS or LSF job of several hosts, or the slots of a job on this host, where none were given.
SuperviseOptions with_hosts_of_job(SuperviseOptions options, const Environment& environment);
/// How many ranks there is room for: the slots of --hosts, the tasks of the job, or else `cores`; see
/// count_usable_cores().
int all_slots(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher);
/// The requested number of ranks: all slots but the spares, unless it is given.
int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher);
/// How many of `ranks` fit on the hosts that were not lost; all of them if no hosts are known.
int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment,
                  const Launcher& launcher);
/// What launchers call a host: "n1" for root@N1.cluster. Addresses stay whole.
std::string short_name(const std::string& host);
/// The name that --hosts has for a host, which launchers name by its short_name(); the name itself if it has none.
std::string name_in_hosts(const SuperviseOptions& options, const std::string& host);
/// The hosts of --hosts without this one, whose name is `here`.
Hosts other_hosts(const SuperviseOptions& options, const std::string& here);
/// True if the launcher must log in to another host; `here` is the name of this one.
bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment);
/// Throws an Error (ExitCode::usage) for invalid options. `here`: the name of this host.
void check(const SuperviseOptions& options, int ranks, int slots, const Environment& environment,
           const Launcher& launcher, const std::string& here = {});

struct LaunchCommand {
  std::vector<std::string> words;
  Variables environment;  ///< added to this process's environment
};

/// What the ranks are told about their supervisor; see launch/supervised.hpp.
struct SupervisorInfo {
  std::string id = {}, started = {};
  std::optional<std::chrono::seconds> used = {};  ///< since the first start
  std::time_t job_end = 0;                        ///< of the batch job, where the ranks do not know it from Slurm
  int full_worker_count = 0;
};

/// `ranks` on all hosts but the lost ones. `flag_variables`: the names of variables that ranks on other hosts get.
LaunchCommand launch_command(const FoundLauncher& launcher, const SuperviseOptions& options, int ranks,
                             const Hosts& lost, const SupervisorInfo& supervisor_info, const Folders& folders,
                             const Environment& environment, const std::vector<std::string>& flag_variables = {});

}  // namespace muster::detail::supervise
