#include "launch/launcher.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

namespace muster::detail::launch {
namespace {

int number(const Environment& environment, std::initializer_list<const char*> names, int fallback) {
  for (const char* name : names)
    if (const char* value = environment(name); value != nullptr && *value != '\0') return std::atoi(value);
  return fallback;
}

}  // namespace

bool is_first_process(const Environment& environment) {
  return number(environment, {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}, 0) == 0;
}

std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment) {
  const int tasks = number(environment, {"SLURM_STEP_NUM_TASKS"}, 1);
  const bool other_launcher = environment("PMIX_RANK") != nullptr || environment("OMPI_COMM_WORLD_SIZE") != nullptr;
  if (tasks <= 1 || environment("SLURM_PROCID") == nullptr || other_launcher) return std::nullopt;
  return SeparateWorlds{
      .task = number(environment, {"SLURM_PROCID"}, 0),
      .fact = "srun started " + std::to_string(tasks) + " tasks without PMIx, so they cannot find each other",
      .remedy = "Start them with srun --mpi=pmix"};
}

std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size) {
  const int tasks = number(environment, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}, 1);
  if (world_size != 1 || tasks <= 1) return std::nullopt;
  return SeparateWorlds{.task = number(environment, {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}, 0),
                        .fact = "the launcher started " + std::to_string(tasks) +
                                " processes, but each of them is alone in its MPI world",
                        .remedy = "Use the mpirun of the MPI that this program is linked with, or srun --mpi=pmix"};
}

bool started_by_srun(const Environment& environment) {
  return environment("SLURM_STEP_ID") != nullptr && environment("SLURM_PROCID") != nullptr &&
         environment("OMPI_COMM_WORLD_SIZE") == nullptr;
}

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

std::string cpu_mask() {
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
