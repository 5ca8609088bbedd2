#include "base/cpus.hpp"

#include "base/control_groups.hpp"
#include "base/host.hpp"
#include "base/text.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <system_error>
#include <tuple>

namespace muster::detail {
namespace {

namespace fs = std::filesystem;

/// A cpu_set_t with room for at least `cpus` CPUs.
struct KernelSet {
  explicit KernelSet(std::size_t cpus)
      : bytes(CPU_ALLOC_SIZE(cpus)), set(CPU_ALLOC(cpus), [](cpu_set_t* one) { CPU_FREE(one); }) {
    CPU_ZERO_S(bytes, set.get());
  }
  std::size_t bytes;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set;
};

/// The number at the beginning of a file; 0 if there is none.
int number_in(const fs::path& file) {
  int number = 0;
  std::ifstream(file) >> number;
  return number;
}

std::vector<int> list_in(const fs::path& file) { return parse_cpu_list(first_line(file)); }

/// How many CPUs a control group grants; infinity if it sets no limit. Version 2 has "max 100000" or "150000 100000"
/// (quota and period) in cpu.max. Version 1 has the two numbers in files of their own, and -1 for no limit.
double quota_of_group(const fs::path& folder) {
  std::string quota;
  double period = 0;
  if (std::ifstream file(folder / "cpu.max"); file >> quota >> period && quota != "max" && period > 0)
    return std::atof(quota.c_str()) / period;
  double given = 0;
  std::ifstream first(folder / "cpu.cfs_quota_us"), second(folder / "cpu.cfs_period_us");
  if (first >> given && second >> period && given > 0 && period > 0) return given / period;
  return HUGE_VAL;
}

}  // namespace

std::string cpu_mask(pid_t process) {
  // The kernel refuses (EINVAL) a set that is smaller than its own, so try larger and larger ones.
  for (std::size_t cpus = CPU_SETSIZE; cpus <= std::size_t{1} << 20; cpus *= 2) {
    const KernelSet found(cpus);
    if (::sched_getaffinity(process, found.bytes, found.set.get()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    std::string mask(cpus, '0');
    for (std::size_t cpu = 0; cpu < cpus; ++cpu)
      if (CPU_ISSET_S(cpu, found.bytes, found.set.get())) mask[cpu] = '1';
    return mask.erase(mask.find_last_of('1') + 1);
  }
  return "1";
}

bool bind_threads(const std::string& mask) {
  const KernelSet wanted(std::max<std::size_t>(mask.size(), CPU_SETSIZE));
  for (std::size_t cpu = 0; cpu < mask.size(); ++cpu)
    if (mask[cpu] == '1') CPU_SET_S(cpu, wanted.bytes, wanted.set.get());
  if (::sched_setaffinity(0, wanted.bytes, wanted.set.get()) != 0) return false;
  // A thread that is not bound yet may start another one meanwhile, so repeat until no new thread appears.
  std::set<pid_t> bound;
  for (std::size_t before = 0; bound.empty() || before != bound.size();) {
    before = bound.size();
    std::error_code error;
    for (fs::directory_iterator task("/proc/self/task", error), end; !error && task != end; task.increment(error)) {
      const auto thread = static_cast<pid_t>(std::atoi(task->path().filename().c_str()));
      if (bound.insert(thread).second) ::sched_setaffinity(thread, wanted.bytes, wanted.set.get());
    }
    if (bound.empty()) break;
  }
  return true;
}

std::vector<int> parse_cpu_list(const std::string& list) {
  std::vector<int> cpus;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    const int numbers = std::sscanf(range.c_str(), "%d-%d", &first, &last);
    if (numbers == 1) last = first;
    for (int cpu = first; numbers >= 1 && cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::string mask_of(const std::vector<int>& cpus) {
  std::string mask;
  for (const int cpu : cpus) {
    const auto place = static_cast<std::size_t>(cpu);
    mask.resize(std::max(mask.size(), place + 1), '0');
    mask[place] = '1';
  }
  return mask;
}

std::vector<Core> cores_of_machine(const fs::path& root) {
  const auto cpus = root / "sys/devices/system/cpu";
  std::map<std::tuple<int, int, int, int>, Core> cores;  // package, die, core, first CPU
  for (const int cpu : list_in(cpus / "online")) {
    const auto topology = cpus / str("cpu", cpu) / "topology";
    auto siblings = list_in(topology / "thread_siblings_list");
    if (siblings.empty()) siblings = {cpu};
    if (siblings.front() != cpu) continue;
    cores[{number_in(topology / "physical_package_id"), number_in(topology / "die_id"), number_in(topology / "core_id"),
           cpu}] = {cpu, siblings};
  }
  std::vector<Core> in_order;
  for (auto& [place, core] : cores) in_order.push_back(std::move(core));
  return in_order;
}

std::vector<Core> cores_in(const std::string& mask, const std::vector<Core>& cores) {
  std::vector<Core> found;
  std::set<int> known;
  const auto has = [&](int cpu) {
    return static_cast<std::size_t>(cpu) < mask.size() && mask[static_cast<std::size_t>(cpu)] == '1';
  };
  for (const auto& core : cores) {
    known.insert(core.cpus.begin(), core.cpus.end());
    Core part{core.number, {}};
    std::ranges::copy_if(core.cpus, std::back_inserter(part.cpus), has);
    if (!part.cpus.empty()) found.push_back(std::move(part));
  }
  for (int cpu = 0; cpu < static_cast<int>(mask.size()); ++cpu)
    if (has(cpu) && !known.contains(cpu)) found.push_back({cpu, {cpu}});
  return found;
}

std::string cpu_model(const fs::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return {};
}

double cpu_quota(const fs::path& root) {
  double least = HUGE_VAL;
  for_each_control_group("cpu", root, [&](const fs::path& group) { least = std::min(least, quota_of_group(group)); });
  return least;
}

int count_usable_cores(const std::string& mask, const fs::path& root) {
  const auto cores = static_cast<double>(cores_in(mask, cores_of_machine(root)).size());
  return std::max(1, static_cast<int>(std::min(cores, cpu_quota(root))));
}

}  // namespace muster::detail
