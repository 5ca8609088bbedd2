// Binding ranks to cores: how the ranks of a node divide the node's cores, and which cores another launch uses. A
// launch claims the cores of its ranks (base/claim.hpp). If the user has set the number of threads, each rank claims
// only as many cores as it has threads.
#pragma once

#include "base/claim.hpp"
#include "base/cpus.hpp"
#include "base/export.hpp"
#include "muster/communicator.hpp"
#include "muster/launch.hpp"

#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::launch {

/// Cores that other launches have claimed: by the core's number, the id of the process; 0 if the id is not known.
using TakenCores = std::map<int, pid_t>;

/// The id of the process that has claimed the core; 0 if the id is not known; empty if no process has claimed the core.
MUSTER_INTERNAL_API std::optional<pid_t> claimant_of(const Core& core);

/// masks[r]: the CPUs on which local rank r may run. Returns new masks. Ranks with the same mask divide its cores that
/// are not taken as evenly as possible: each rank gets whole cores, which are neighbours. If there are fewer than
/// `least_cores` for each rank, all these ranks get all free cores. All ranks keep their masks if two masks differ and
/// overlap; ranks keep a mask that has fewer free cores than ranks.
std::vector<std::string> share_out(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                                   const TakenCores& taken, std::size_t least_cores = 1);

/// The taken cores in masks that have fewer free cores than ranks: there, ranks share cores with another launch. Empty
/// if all ranks have free cores.
TakenCores shared_with_others(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                              const TakenCores& taken);

/// True if some CPU is in the masks of two ranks.
MUSTER_INTERNAL_API bool masks_overlap(const std::vector<std::string>& masks);

/// The launch's ranks on this rank's node and host.
struct NodeRanks {
  std::vector<std::string> masks;  ///< [local rank]: the CPUs on which each rank of this node may run; see cpu_mask()
  /// The smallest CPU quota of these ranks' control groups; infinity if there is none.
  double quota = std::numeric_limits<double>::infinity();
  std::set<pid_t> processes;  ///< ids of the launch's processes on this host
};
/// Collective.
NodeRanks find_node_ranks(const Communicator& world);

/// Claims cores of this node for its ranks, binds this rank to its share of them, and returns this rank's claims.
/// Writes the new masks to `ranks`. `threads`: the number of threads that the user has set for this rank; 0 if none is
/// set. `least_cores`: see share_out(). If other launches leave fewer free cores than ranks, these ranks stay where
/// they are, and rank 0 warns. If the quota is less than the number of cores, other processes may use the cores too, so
/// nothing is claimed or divided. Collective.
std::vector<Claim> bind_to_cores(const Communicator& world, NodeRanks& ranks, int threads, std::size_t least_cores);

/// This rank's place among the launch's ranks on its host. See the functions of Launch that return these values.
struct RankOnHost {
  int local_process_index = 0;
  std::set<pid_t> processes = {};
  int cpus = 1;
  int threads = 1;
  std::shared_ptr<const std::vector<Claim>> claims = {};  ///< claims on cores, kept as long as a launch uses the cores
};
/// Returns this rank's place, after it has bound the rank to cores if `may_bind` is true and the flags allow it. Warns
/// if OpenMP's variables or the launcher leave the rank fewer CPUs than it could have, and if OMP_NUM_THREADS is no
/// number of threads. Collective.
RankOnHost find_rank_on_host(const Communicator& world, const LaunchFlags& flags, bool may_bind);

}  // namespace muster::detail::launch
