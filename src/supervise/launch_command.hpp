// Makes the command that starts the ranks, from the options and the environment. All functions are pure, except that
// with_hosts_of_job() reads a file.
#pragma once

#include "muster/supervise.hpp"
#include "supervise/launchers/launchers.hpp"

#include <chrono>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::supervise {

/// One of the programs of a job, with its number of ranks.
struct Program {
  std::vector<std::string> command;
  std::optional<int> ranks = {};  ///< empty for a job's only program, which has all ranks
};
/// True for a command such as -n 6 ./heat : -n 2 ./train. Then the number of ranks never changes.
bool names_several_programs(const SuperviseOptions& options);
/// Returns the programs of the command. Throws an Error (ExitCode::usage) if it is incomplete.
std::vector<Program> programs_of(const SuperviseOptions& options);
/// Fills in the ranks of several programs. Throws an Error (ExitCode::usage) if other options contradict them.
SuperviseOptions with_ranks_of_programs(SuperviseOptions options);

/// Returns the hosts of a PBS or LSF job with their slots, as "n1:2,n2:2". `text`: the file with one line for each
/// slot.
std::string hosts_of_slots(const std::string& text);
/// If the options name no hosts, fills in those of a PBS or LSF job that has several, and the job's slots as the number
/// of ranks if none is given. Changes nothing in a Slurm job.
SuperviseOptions with_hosts_of_job(SuperviseOptions options, const Environment& environment);
/// Returns for how many ranks there is room: the slots of --hosts, else the tasks of the batch job, else `cores`
/// (count_usable_cores()).
int all_slots(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher);
/// Returns the number of ranks to start: the requested number, or all slots except the spares.
int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher);
/// Returns how many of `ranks` fit on the hosts that were not lost; all of them if no hosts are known.
int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment,
                  const Launcher& launcher);
/// Returns the name by which launchers call a host: "n1" for root@N1.cluster. IPv4 addresses are not shortened.
std::string short_name(const std::string& host);
/// Returns the name that --hosts uses for a host with this short_name(); `host` if --hosts does not have it.
std::string name_in_hosts(const SuperviseOptions& options, const std::string& host);
/// Returns the hosts of --hosts without this host, whose name is `here`.
Hosts other_hosts(const SuperviseOptions& options, const std::string& here);
/// True if the launcher must log in to another host by ssh. `here`: the name of this host.
bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment);
/// Throws an Error (ExitCode::usage) for invalid options. `here`: the name of this host.
void check(const SuperviseOptions& options, int ranks, int slots, const Environment& environment,
           const Launcher& launcher, const std::string& here = {});

struct LaunchCommand {
  std::vector<std::string> words;
  Variables environment;  ///< added to this process's environment
};

/// What the supervisor tells the ranks about itself; see launch/supervised.hpp.
struct SupervisorInfo {
  std::string id = {}, started = {};
  std::optional<std::chrono::seconds> used = {};  ///< time since the first start
  std::time_t job_end = 0;  ///< end of the batch job, if Slurm does not tell it to the ranks; else 0
  int full_worker_count = 0;
};

/// Returns the command for `ranks` ranks on all hosts except the lost ones. `flag_variables`: names of further
/// variables that ranks on other hosts must get.
LaunchCommand launch_command(const FoundLauncher& launcher, const SuperviseOptions& options, int ranks,
                             const Hosts& lost, const SupervisorInfo& supervisor_info, const Folders& folders,
                             const Environment& environment, const std::vector<std::string>& flag_variables = {});

}  // namespace muster::detail::supervise
