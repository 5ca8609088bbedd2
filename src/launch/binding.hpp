// Binding ranks to cores: how the ranks of a node share them out, and which of them another launch uses. A launch
// claims as many cores as its ranks have threads (base/claim.hpp).
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

/// Cores that other launches have claimed: the number of each core, and the process, 0 if it is not known.
using TakenCores = std::map<int, pid_t>;

/// The process that has claimed the core; empty if none has.
MUSTER_INTERNAL_API std::optional<pid_t> claimant_of(const Core& core);

/// masks[r]: where local rank r may run. Returns where each is to run: ranks with the same mask get whole cores of it,
/// neighbours together and as evenly as possible, without those that are taken. If there are fewer than `least_cores`
/// for each, they share all that are free. A rank keeps its mask if some ranks' masks differ and overlap, or if its own
/// has fewer free cores than ranks.
std::vector<std::string> share_out(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                                   const TakenCores& taken, std::size_t least_cores = 1);

/// The taken cores among those that ranks with too few free cores share with another launch; empty if all is well.
TakenCores shared_with_others(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                              const TakenCores& taken);

/// True if a CPU is in the masks of two ranks.
MUSTER_INTERNAL_API bool masks_overlap(const std::vector<std::string>& masks);

/// The launch's ranks where this rank is.
struct NodeRanks {
  std::vector<std::string> masks;  ///< of this node, [local rank]
  /// CPUs that the node's control groups grant; infinity if they set no limit.
  double quota = std::numeric_limits<double>::infinity();
  std::set<pid_t> processes;  ///< of this host
};
/// Collective.
NodeRanks find_node_ranks(const Communicator& world);

/// Claims cores of this node for its ranks, binds this rank to its share of them, and returns its claims. `ranks` then
/// has the new masks. `threads`: how many this rank has been told to use; 0 if it was not told. `least_cores`: see
/// share_out(). If another launch uses the cores, the ranks stay where they are, and rank 0 warns. Where a quota grants
/// less than the cores, other processes share them, and nothing is claimed or shared out. Collective.
std::vector<Claim> bind_to_cores(const Communicator& world, NodeRanks& ranks, int threads, std::size_t least_cores);

/// This rank among the launch's ranks on its host; see the functions of Launch.
struct RankOnHost {
  int local_process_index = 0;
  std::set<pid_t> processes = {};
  int cpus = 1;
  int threads = 1;
  std::shared_ptr<const std::vector<Claim>> claims = {};  ///< on cores, as long as a launch needs them
};
/// Finds them, after it has bound this rank to cores if it `may_bind` and the flags allow it. Warns if OpenMP's
/// variables or the launcher leave the rank fewer CPUs than it could have. Collective.
RankOnHost find_rank_on_host(const Communicator& world, const LaunchFlags& flags, bool may_bind);

}  // namespace muster::detail::launch
