#include "launch/binding.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"
#include "muster/json.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <utility>

namespace muster::detail::launch {
namespace {

std::string name_of(const Core& core) { return str("cpu/", core.number); }

/// The union of the masks.
std::string united(const std::vector<std::string>& masks) {
  std::string all;
  for (const auto& mask : masks) {
    all.resize(std::max(all.size(), mask.size()), '0');
    for (std::size_t cpu = 0; cpu < mask.size(); ++cpu)
      if (mask[cpu] == '1') all[cpu] = '1';
  }
  return all;
}

/// Ranks with the same mask.
struct CoreGroup {
  std::string mask;
  std::vector<std::size_t> ranks;
  std::vector<Core> free = {};  ///< cores of the mask that no other launch has claimed
  TakenCores taken = {};        ///< cores of the mask that another launch has claimed
};

std::vector<CoreGroup> groups_of(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                                 const TakenCores& taken) {
  std::map<std::string, CoreGroup> groups;
  for (std::size_t rank = 0; rank < masks.size(); ++rank) groups[masks[rank]].ranks.push_back(rank);
  std::vector<CoreGroup> result;
  for (auto& [mask, group] : groups) {
    group.mask = mask;
    for (auto& core : cores_in(mask, cores))
      if (const auto claimed = taken.find(core.number); claimed == taken.end())
        group.free.push_back(std::move(core));
      else
        group.taken.insert(*claimed);
    result.push_back(std::move(group));
  }
  return result;
}

/// True if some CPU is in the masks of two groups.
bool overlap(const std::vector<CoreGroup>& groups) {
  std::vector<std::string> masks;
  for (const auto& group : groups) masks.push_back(group.mask);
  return masks_overlap(masks);
}

/// Divides `items` into `parts` almost equal parts and returns the part number `index`.
template <class Item>
std::span<const Item> part_of(const std::vector<Item>& items, std::size_t parts, std::size_t index) {
  const auto begin = items.size() * index / parts, end = items.size() * (index + 1) / parts;
  return std::span(items).subspan(begin, end - begin);
}

/// " (process 4711, 4712)", at most three ids; empty if no id is known.
std::string text_of_processes(const std::set<pid_t>& processes) {
  std::vector<pid_t> known;
  std::ranges::copy_if(processes, std::back_inserter(known), [](pid_t process) { return process > 0; });
  return known.empty() ? "" : " (process " + listed(known, 3, [](pid_t one) { return std::to_string(one); }) + ")";
}

/// The warning about a node on which another launch uses cores that this launch needs.
std::string conflict_on(const std::string& host, std::size_t ranks, const TakenCores& taken) {
  std::set<pid_t> processes;
  for (const auto& [core, process] : taken) processes.insert(process);
  return "another muster launch" + text_of_processes(processes) + " uses " + counted(taken.size(), "core") + " of " +
         host + ", on which " + counted(ranks, "rank") + " of this one " + (ranks == 1 ? "runs" : "run") +
         ": the two slow each other. Start them one after the other, or give each its own cores, as in taskset -c 0-3 "
         "muster run";
}

}  // namespace

bool masks_overlap(const std::vector<std::string>& masks) {
  const auto count = [](const std::string& mask) { return std::ranges::count(mask, '1'); };
  std::ptrdiff_t all = 0;
  for (const auto& mask : masks) all += count(mask);
  return all != count(united(masks));
}

std::optional<pid_t> claimant_of(const Core& core) { return holder_of(name_of(core)); }

std::vector<std::string> share_out(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                                   const TakenCores& taken, std::size_t least_cores) {
  auto shares = masks;
  const auto groups = groups_of(cores, masks, taken);
  if (overlap(groups)) return shares;
  for (const auto& [mask, ranks, free, others] : groups) {
    if (free.size() < ranks.size()) continue;
    const auto parts = free.size() < least_cores * ranks.size() ? 1 : ranks.size();
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      std::vector<int> cpus;
      for (const auto& core : part_of(free, parts, i % parts))
        cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
      shares[ranks[i]] = mask_of(cpus);
    }
  }
  return shares;
}

TakenCores shared_with_others(const std::vector<Core>& cores, const std::vector<std::string>& masks,
                              const TakenCores& taken) {
  TakenCores shared;
  for (const auto& group : groups_of(cores, masks, taken))
    if (group.free.size() < group.ranks.size()) shared.insert(group.taken.begin(), group.taken.end());
  return shared;
}

NodeRanks find_node_ranks(const Communicator& world) {
  const auto& topology = world.topology();
  const Json mine{
      {"mask", process_mask()}, {"quota", cpu_quota()}, {"process", ::getpid()}};  // an infinite quota is null
  const auto all = world.all_gather(json_text(mine));
  NodeRanks ranks;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto rank = json_from_text(all[r]);
    if (topology.hosts[r] == topology.hosts[static_cast<std::size_t>(world.rank())])
      ranks.processes.insert(rank.at("process").get<pid_t>());
    if (topology.node_of_rank[r] != topology.node_rank) continue;
    ranks.masks.push_back(rank.at("mask"));
    if (const auto& quota = rank.at("quota"); quota.is_number()) ranks.quota = std::min<double>(ranks.quota, quota);
  }
  return ranks;
}

std::vector<Claim> bind_to_cores(const Communicator& world, NodeRanks& ranks, int threads, std::size_t least_cores) {
  const auto& topology = world.topology();
  const auto own = static_cast<std::size_t>(world.rank());
  const auto local_rank = static_cast<std::size_t>(topology.local_rank), local_size = ranks.masks.size();
  const auto of_node = [&](const std::string& mine) {
    const auto all = world.all_gather(mine);
    std::vector<std::string> here;
    for (std::size_t r = 0; r < all.size(); ++r)
      if (topology.node_of_rank[r] == topology.node_rank) here.push_back(all[r]);
    return here;
  };

  // The first rank of the node reads which cores the machine has, for all ranks of the node, so that they use the same.
  auto described = Json::array();
  if (local_rank == 0)
    for (const auto& core : cores_of_machine()) described.push_back(core.cpus);
  std::vector<Core> machine;
  for (const auto& cpus : json_from_text(of_node(json_text(described)).front()))
    machine.push_back({cpus.front().get<int>(), cpus.get<std::vector<int>>()});
  const auto cores = cores_in(united(ranks.masks), machine);
  const bool has_all = ranks.quota >= static_cast<double>(cores.size());

  // Each rank claims cores in its part of the node's cores, and looks whether the other cores of this part are claimed.
  std::vector<Claim> claims;
  auto found = Json::array();
  for (const auto& core : has_all ? part_of(cores, local_size, local_rank) : std::span<const Core>()) {
    std::optional<pid_t> claimant;
    if (threads == 0 || claims.size() < static_cast<std::size_t>(threads)) {
      Claim claim(name_of(core));
      claimant = claim.other();
      if (!claimant) claims.push_back(std::move(claim));
    } else {
      claimant = claimant_of(core);
    }
    if (claimant) found.push_back({core.number, *claimant});
  }
  TakenCores taken;
  for (const auto& of_rank : of_node(json_text(found)))
    for (const auto& one : json_from_text(of_rank)) taken.emplace(one.at(0), one.at(1));

  auto shared = shared_with_others(machine, ranks.masks, taken);
  std::erase_if(shared, [&](const auto& one) { return ranks.processes.contains(one.second); });
  const auto conflicts =
      world.all_gather(local_rank > 0 || shared.empty() ? "" : conflict_on(topology.hosts[own], local_size, shared));
  const auto conflict = std::ranges::find_if(conflicts, [](const auto& text) { return !text.empty(); });
  if (conflict != conflicts.end()) log::warn(*conflict);

  if (has_all) ranks.masks = share_out(machine, ranks.masks, taken, least_cores);
  auto& mask = ranks.masks[local_rank];
  if (const auto before = cpu_mask(); mask != before && !bind_threads(mask)) mask = before;
  return claims;
}

RankOnHost find_rank_on_host(const Communicator& world, const LaunchFlags& flags, bool may_bind) {
  const int local_rank = world.topology().local_rank;
  auto node = find_node_ranks(world);
  RankOnHost mine{.local_process_index = local_rank, .processes = node.processes};
  const char* const variable = std::getenv("OMP_NUM_THREADS");
  const auto of_variable = openmp_threads(::getenv);
  if (variable != nullptr && *variable != '\0' && !of_variable)
    log::warn(str("OMP_NUM_THREADS=", variable, " is no number of threads from 1 to ", most_threads,
                  " and is ignored; unset it"));
  const int given = flags.threads.value_or(of_variable.value_or(0));
  const auto binding = openmp_binding(::getenv);
  const bool shares = masks_overlap(node.masks);
  if (const int of_node = launcher_cpus(); !flags.threads && bound_below_share(node.masks, local_rank, of_node))
    log::warn(str("each rank is bound to ", threads_for(node.masks, local_rank), " of ", of_node, " CPUs; ",
                  binding.empty() ? "start with mpirun --bind-to none, or srun --cpus-per-task,"
                                  : "unset " + binding + ", or start with mpirun --bind-to none,",
                  " to use them all"));
  // A rank that is bound to a single core waits whenever another process computes there, and all ranks wait for it. So
  // unless the user asks for that (--bind cores), a rank is only bound to two cores or more.
  if (may_bind && flags.bind != Bind::none)
    mine.claims = std::make_shared<const std::vector<Claim>>(
        bind_to_cores(world, node, given, flags.bind == Bind::cores ? 1 : 2));
  mine.cpus = threads_for(node.masks, local_rank, node.quota);
  mine.threads = given > 0 ? given : mine.cpus;
  // OpenMP binds its threads, except the main thread, when it starts them, whatever this process is bound to.
  if (!binding.empty() && shares && (mine.threads > 1 || !may_bind || flags.bind == Bind::none))
    log::warn(binding +
              " binds the threads of all ranks of a node to the same cores, so that they slow each "
              "other; unset it: muster gives each rank cores of its own (--bind)");
  return mine;
}

}  // namespace muster::detail::launch
