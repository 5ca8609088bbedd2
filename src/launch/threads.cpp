#include "launch/threads.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace muster::detail::launch {

int threads_for(const std::vector<std::string>& masks, int rank) {
  const auto& mine = masks[static_cast<std::size_t>(rank)];
  double share = 0;
  for (std::size_t cpu = 0; cpu < mine.size(); ++cpu) {
    if (mine[cpu] != '1') continue;
    const auto holders = std::count_if(masks.begin(), masks.end(),
                                       [&](const auto& mask) { return cpu < mask.size() && mask[cpu] == '1'; });
    share += 1.0 / static_cast<double>(holders);
  }
  // A sum of halves and thirds may fall just short of a whole number.
  return std::max(1, static_cast<int>(share + 1e-6));
}

bool bound_below_share(const std::vector<std::string>& masks, int rank, int cpus) {
  const int share = cpus / static_cast<int>(masks.size());
  return share > 1 && threads_for(masks, rank) < share;
}

int launcher_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(::getppid(), sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string own_mask() {
  std::string mask(CPU_SETSIZE, '0');
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return "1";
  for (std::size_t cpu = 0; cpu < mask.size(); ++cpu)
    if (CPU_ISSET(cpu, &set)) mask[cpu] = '1';
  mask.resize(mask.find_last_of('1') + 1);
  return mask;
}

}  // namespace muster::detail::launch
