#include "comm/placement.hpp"

#include "base/host.hpp"
#include "base/text.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "comm/mpi_communicator.hpp"
#include "comm/wait.hpp"
#include "node/shared_segment.hpp"

#include <mpi.h>
#include <sched.h>
#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace muster::detail::comm {
namespace {

std::string host_name() {
  std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
  int length = 0;
  check(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name");
  return name.data();
}

/// Returns a text that is equal for two processes exactly if they can share memory: the kernel's boot id, which differs
/// between machines, and the device number of /dev/shm, which may differ between containers.
std::string memory_name() {
  const auto boot = first_line("/proc/sys/kernel/random/boot_id");
  struct stat memory {};
  return ::stat("/dev/shm", &memory) == 0 ? str(boot, ' ', memory.st_dev) : boot;
}

/// The CPUs on which this process may run, as a text with a '1' at [cpu]; empty if the machine has more CPUs than a
/// cpu_set_t holds.
std::string own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  std::string numbers;
  if (::sched_getaffinity(0, sizeof cpus, &cpus) != 0) return numbers;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) numbers += CPU_ISSET(cpu, &cpus) ? '1' : '0';
  return numbers.erase(numbers.find_last_of('1') + 1);
}

}  // namespace

// MPI_Comm_split_type is not used because it compares host names: if all containers are
// called "localhost", its communicators contradict each other and the ranks hang.
Placement find_placement(MpiCommunicator& over) {
  Handshake handshake(over, "finding the ranks of each node");
  Placement placement{.node_of_rank = {}, .hosts = handshake.all_gather(host_name())};
  const auto memories = handshake.all_gather(memory_name());
  const auto cpus = handshake.all_gather(own_cpus());
  std::map<std::pair<std::string, std::string>, int> first_rank;
  for (std::size_t r = 0; r < memories.size(); ++r)
    placement.node_of_rank.push_back(
        first_rank.try_emplace({placement.hosts[r], memories[r]}, static_cast<int>(r)).first->second);

  // Finds out whether the ranks of this node have a CPU each; the first of them removes leftover shared memory.
  const auto rank = rank_in(over.comm);
  const auto node = placement.node_of_rank[static_cast<std::size_t>(rank)];
  std::set<std::size_t> cores;
  std::size_t ranks = 0;
  bool known = true;
  for (std::size_t r = 0; r < cpus.size(); ++r) {
    if (placement.node_of_rank[r] != node) continue;
    ++ranks;
    known = known && !cpus[r].empty();
    for (std::size_t cpu = 0; cpu < cpus[r].size(); ++cpu)
      if (cpus[r][cpu] == '1') cores.insert(cpu);
  }
  has_core_per_rank = !known || cores.size() >= ranks;
  if (rank == node) node::SharedSegment::remove_leftovers();
  return placement;
}

}  // namespace muster::detail::comm
