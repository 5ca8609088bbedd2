// What Slurm's variables tell about its job, and what `muster run` asks Slurm: to end steps, to queue the job again,
// and which nodes are out of service.
#pragma once

#include "supervise/launchers/launchers.hpp"

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace muster::detail::supervise {

/// Returns a variable of this Slurm job; in a heterogeneous job, the variable of each component, as in
/// SLURM_NTASKS_HET_GROUP_1.
std::vector<std::string> in_components(const Environment& environment, const std::string& name);
int nodes_of_job(const Environment& environment);
/// Returns the number of tasks of each component of the Slurm job. If the job has several nodes but no number of tasks,
/// the number that its CPUs allow; 0 if unknown.
std::vector<int> tasks_of_job(const Environment& environment);
int all_tasks_of_job(const Environment& environment);

/// Kills all steps of this job that these srun processes have started on `host`, since a step goes on when its srun is
/// killed. Waits a moment until they have ended. Returns false if some may be left: Slurm does not answer, or waits for
/// a node that is gone.
bool end_steps(const std::set<pid_t>& sruns, const std::string& host);

/// Puts a job into the queue again; Slurm then ends the running job. Returns false if Slurm refuses or does not answer.
bool requeue(const std::string& job);

/// Returns the nodes that new steps must not use: drained nodes, where a running step may go on, and nodes that are
/// down. `text`: lines of sinfo, "NODE STATE", with the short names of states.
std::set<std::string> nodes_out_of_service(const std::string& text);
/// Returns these nodes for this process's job; none if Slurm does not answer.
std::set<std::string> nodes_out_of_service();

}  // namespace muster::detail::supervise
