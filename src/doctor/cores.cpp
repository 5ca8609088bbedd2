#include "base/listed.hpp"
#include "doctor/checks.hpp"
#include "launch/launcher.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

namespace muster::detail::doctor {
namespace {

/// The number of CPUs in a list of the kernel, such as "0-3,8".
int count_in(const std::string& list) {
  int count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    const int numbers = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    count += numbers == 2 ? last - first + 1 : numbers == 1 ? 1 : 0;
  }
  return count;
}

/// The CPUs that a control group grants; infinity if it does not say. Version 2: "max 100000" or "150000 100000".
double quota_in(const std::filesystem::path& folder) {
  std::string quota;
  double period = 0;
  if (std::ifstream file(folder / "cpu.max"); file >> quota >> period && quota != "max" && period > 0)
    return std::atof(quota.c_str()) / period;
  double given = 0;
  std::ifstream first(folder / "cpu.cfs_quota_us"), second(folder / "cpu.cfs_period_us");
  if (first >> given && second >> period && given > 0 && period > 0) return given / period;
  return HUGE_VAL;
}

/// The least quota of this process's control group and those around it; null if there is none.
Json quota(const std::filesystem::path& root) {
  double least = HUGE_VAL;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controllers != ",," && controllers.find(",cpu,") == std::string::npos) continue;
    const auto mount = root / (controllers == ",," ? "sys/fs/cgroup" : "sys/fs/cgroup/cpu");
    for (std::filesystem::path group = line.substr(second + 1);; group = group.parent_path()) {
      least = std::min(least, quota_in(mount / group.relative_path()));
      if (!group.has_relative_path()) break;
    }
  }
  return std::isinf(least) ? Json() : Json(least);
}

std::string cpu_model(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return {};
}

std::string text_of(double cpus) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", cpus);
  return text;
}

}  // namespace

Json look_at_node_cores(const std::filesystem::path& root) {
  std::string online;
  std::getline(std::ifstream(root / "sys/devices/system/cpu/online"), online);
  return {{"cpus", std::max(1, count_in(online))}, {"model", cpu_model(root)}, {"quota", quota(root)}};
}

Json look_at_rank_cores(const Environment& environment) {
  const char* const threads = environment("OMP_NUM_THREADS");
  return {{"mask", launch::cpu_mask()},
          {"launcher_cpus", launch::launcher_cpus()},
          {"threads", threads == nullptr ? 0 : std::atoi(threads)}};
}

Findings check_cores(const Json& node, const std::vector<Json>& ranks) {
  using enum Finding::Severity;
  const int cpus = node.at("cpus"), count = static_cast<int>(ranks.size());
  std::vector<std::string> masks;
  std::string usable;                                     // by any rank
  std::map<std::string, std::vector<std::size_t>> bound;  // to one CPU: the ranks, by their mask
  int threads = 0, of_launcher = 1;
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
    threads += chosen > 0 ? chosen : launch::threads_for(masks, static_cast<int>(rank));
  }
  const int available = static_cast<int>(std::ranges::count(usable, '1'));

  Findings findings;
  for (const auto& [mask, together] : bound)
    if (together.size() > 1 && cpus >= count)
      findings.push_back(
          {to_mend, "cores",
           counted(together.size(), "rank") + " of the node are bound to CPU " + std::to_string(mask.find('1')) +
               ", and it has " + std::to_string(cpus),
           "Start with mpirun --bind-to none, or srun --cpus-per-task, and one launcher at a time on a node"});
  if (!findings.empty()) return findings;
  const auto quota = node.at("quota").is_number() ? node.at("quota").get<double>() : HUGE_VAL;
  if (quota < std::min(available, threads))
    findings.push_back({warning, "cores",
                        "the control group grants " + text_of(quota) + " CPUs, and " + counted(count, "rank") +
                            " with " + counted(threads, "thread") + " run there",
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
    findings.push_back({warning, "cores",
                        "each rank is bound to " + std::to_string(launch::threads_for(masks, 0)) + " of " +
                            counted(of_launcher, "CPU"),
                        "Start with mpirun --bind-to none, or srun --cpus-per-task, to use them all"});
  if (findings.empty())
    findings.push_back(
        {ok, "cores",
         counted(count, "rank") + " on " + counted(available, "CPU") + ", " + counted(threads, "thread") + " in all"});
  return findings;
}

}  // namespace muster::detail::doctor
