#include "base/cpus.hpp"
#include "base/text.hpp"
#include "doctor/checks.hpp"
#include "launch/binding.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"

#include <algorithm>
#include <cmath>
#include <map>

namespace muster::detail::doctor {
Json look_at_node_cores(const std::filesystem::path& root) {
  const double quota = cpu_quota(root);
  int cpus = 0;
  auto claims = Json::array();
  for (const auto& core : cores_of_machine(root)) {
    cpus += static_cast<int>(core.cpus.size());
    if (const auto process = launch::claimant_of(core)) claims.push_back({{"cpu", core.number}, {"process", *process}});
  }
  return {{"cpus", std::max(1, cpus)},
          {"model", cpu_model(root)},
          {"quota", std::isinf(quota) ? Json() : Json(quota)},
          {"claims", std::move(claims)}};
}

Json look_at_rank_cores(const Environment& environment) {
  return {{"mask", launch::process_mask()},
          {"bound_by", launch::openmp_binding(environment)},
          {"launcher_cpus", launch::launcher_cpus()},
          {"threads", launch::openmp_threads(environment).value_or(0)}};
}

Findings check_cores(const Json& node, const std::vector<Json>& ranks) {
  using enum Finding::Severity;
  const int cpus = node.at("cpus"), count = static_cast<int>(ranks.size());
  std::vector<std::string> masks;
  std::string usable;                                     // CPUs that at least one rank may use
  std::map<std::string, std::vector<std::size_t>> bound;  // ranks that are bound to one CPU, by their mask
  int threads = 0, of_launcher = 1;
  const auto quota = node.at("quota").is_number() ? node.at("quota").get<double>() : HUGE_VAL;
  for (const auto& rank : ranks) {
    of_launcher = std::max(of_launcher, rank.at("launcher_cpus").get<int>());
    masks.push_back(rank.at("mask"));
    const auto& mask = masks.back();
    usable.resize(std::max(usable.size(), mask.size()), '0');
    for (std::size_t cpu = 0; cpu < mask.size(); ++cpu)
      if (mask[cpu] == '1') usable[cpu] = '1';
    if (std::ranges::count(mask, '1') == 1) bound[mask].push_back(masks.size() - 1);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const int chosen = ranks[rank].at("threads");
    threads += chosen > 0 ? chosen : launch::threads_for(masks, static_cast<int>(rank), quota);
  }
  const int available = static_cast<int>(std::ranges::count(usable, '1'));

  Findings findings;
  if (const auto binding = ranks.front().value("bound_by", std::string());
      !binding.empty() && launch::masks_overlap(masks))
    return {{warning, "cores",
             binding + " binds the threads of " + counted(count, "rank") + " of the node to the same cores",
             "Unset it: muster gives each rank cores of its own"}};
  for (const auto& [mask, together] : bound)
    if (together.size() > 1 && cpus >= count)
      findings.push_back(
          {to_mend, "cores",
           str(counted(together.size(), "rank"), " of the node are bound to CPU ", mask.find('1'), ", and it has ",
               cpus),
           "Start with mpirun --bind-to none, or srun --cpus-per-task, and one launcher at a time on a node"});
  if (!findings.empty()) return findings;
  if (quota < std::min(available, threads))
    findings.push_back({warning, "cores",
                        "the control group grants " + formatted("%.3g", quota) + " CPUs, and " +
                            counted(count, "rank") + " with " + counted(threads, "thread") + " run there",
                        "Ask for more CPUs (--cpus of a container, --cpus-per-task of Slurm), or start fewer ranks"});
  if (count > available)
    findings.push_back({warning, "cores", counted(count, "rank") + " share " + counted(available, "CPU"),
                        "Start at most as many ranks as CPUs"});
  else if (threads > available)
    findings.push_back(
        {warning, "cores",
         counted(count, "rank") + " with " + counted(threads, "thread") + " in all share " + counted(available, "CPU"),
         "Unset OMP_NUM_THREADS, and each rank takes its share"});
  else if (launch::bound_below_share(masks, 0, of_launcher))
    findings.push_back(
        {warning, "cores",
         str("each rank is bound to ", launch::threads_for(masks, 0), " of ", counted(of_launcher, "CPU")),
         "Start with mpirun --bind-to none, or srun --cpus-per-task, to use them all"});
  std::vector<std::string> claimants;
  std::size_t claimed = 0;
  for (const auto& claim : node.at("claims")) {
    const std::size_t cpu = claim.at("cpu");
    if (cpu >= usable.size() || usable[cpu] != '1') continue;
    ++claimed;
    if (const int process = claim.at("process"); process > 0) {
      auto name = std::to_string(process);
      if (std::ranges::find(claimants, name) == claimants.end()) claimants.push_back(std::move(name));
    }
  }
  const auto named = listed(claimants, 3, [](const auto& process) { return process; });
  if (claimed > 0)
    findings.push_back({warning, "cores",
                        "another muster launch" + (named.empty() ? "" : " (process " + named + ")") + " uses " +
                            counted(claimed, "core"),
                        "Wait for its end, or give each launch its own cores, as in taskset -c 0-3 muster run"});
  if (findings.empty())
    findings.push_back(
        {ok, "cores",
         counted(count, "rank") + " on " + counted(available, "CPU") + ", " + counted(threads, "thread") + " in all"});
  return findings;
}

}  // namespace muster::detail::doctor
