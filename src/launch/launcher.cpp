#include "launch/launcher.hpp"

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

std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment) {
  const int tasks = number(environment, {"SLURM_STEP_NUM_TASKS"}, 1);
  const bool other_launcher = environment("PMIX_RANK") != nullptr || environment("OMPI_COMM_WORLD_SIZE") != nullptr;
  if (tasks <= 1 || environment("SLURM_PROCID") == nullptr || other_launcher) return std::nullopt;
  return SeparateWorlds{
      .tasks = tasks,
      .task = number(environment, {"SLURM_PROCID"}, 0),
      .fact = "srun started " + std::to_string(tasks) + " tasks without PMIx, so they cannot find each other",
      .remedy = "Start them with srun --mpi=pmix"};
}

std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size) {
  const int tasks = number(environment, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}, 1);
  if (world_size != 1 || tasks <= 1) return std::nullopt;
  return SeparateWorlds{.tasks = tasks,
                        .task = number(environment, {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}, 0),
                        .fact = "the launcher started " + std::to_string(tasks) +
                                " processes, but each of them is alone in its MPI world",
                        .remedy = "Use the mpirun of the MPI that this program is linked with, or srun --mpi=pmix"};
}

}  // namespace muster::detail::launch
