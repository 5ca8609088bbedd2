// Threads per rank, as a pure function of the CPUs that each local rank may run on.
#pragma once

#include <string>
#include <vector>

namespace muster::detail::launch {

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
