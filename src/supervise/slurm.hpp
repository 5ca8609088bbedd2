// What Slurm's variables say of its job, and what `muster run` asks of Slurm: to end the steps that it has started, to
// queue its job again, and which nodes serve.
#pragma once

#include "supervise/launchers/launchers.hpp"

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace muster::detail::supervise {

/// A variable of this Slurm job; of a heterogeneous job that of each component, as SLURM_NTASKS_HET_GROUP_1.
std::vector<std::string> in_components(const Environment& environment, const std::string& name);
int nodes_of_job(const Environment& environment);
/// The tasks of each component of the Slurm job, or else those that its CPUs are enough for where it has several nodes;
/// 0 if they are not known.
std::vector<int> tasks_of_job(const Environment& environment);
int all_tasks_of_job(const Environment& environment);

/// Kills all steps of this job that these processes of srun have started on `host`, and waits a moment until they have
/// ended. They go on when their srun is killed. Returns false if some may be left: Slurm does not answer, or waits for
/// a node that is gone.
bool end_steps(const std::set<pid_t>& sruns, const std::string& host);

/// Puts a job into the queue again; Slurm then ends it here. Returns false if Slurm refuses it or does not answer.
bool requeue(const std::string& job);

/// The nodes that new steps should not use: drained ones, on which a step that runs goes on, and those that are down.
/// `text`: lines of sinfo, "NODE STATE" with the short names of states.
std::set<std::string> nodes_out_of_service(const std::string& text);
/// Those of this process's job; none if Slurm does not answer.
std::set<std::string> nodes_out_of_service();

}  // namespace muster::detail::supervise
