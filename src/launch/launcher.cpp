#include "launch/launcher.hpp"

#include "base/cpus.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

namespace muster::detail::launch {
namespace {

int number(const Environment& environment, const char* name, int fallback) {
  const char* const value = environment(name);
  return value == nullptr || *value == '\0' ? fallback : std::atoi(value);
}

/// The variables in which a launcher tells a process how many there are, and which one it is.
struct LauncherVariables {
  const char* launcher;
  const char* processes;
  const char* number;
};

constexpr const char* step_tasks = "SLURM_STEP_NUM_TASKS";

/// The first that is set counts: a launcher may start its daemons by srun. PALS tells only how many are on this node.
constexpr std::array<LauncherVariables, 7> launchers{{{"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                                      {"mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                                                      {"mpiexec", "PMI_SIZE", "PMI_RANK"},
                                                      {"PALS", "PALS_LOCAL_SIZE", "PALS_RANKID"},
                                                      {"jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"},
                                                      {"Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
                                                      {"srun", step_tasks, "SLURM_PROCID"}}};

}  // namespace

std::string srun_for(const std::string& mpi_library) {
  const auto is = [&](std::string_view name) { return mpi_library.find(name) != std::string::npos; };
  return is("CRAY") ? "srun --mpi=cray_shasta" : is("Open MPI") ? "srun --mpi=pmix" : "srun --mpi=pmi2";
}

std::optional<StartedBy> started_by(const Environment& environment) {
  for (const auto& one : launchers) {
    if (environment(one.processes) == nullptr) continue;
    StartedBy found{one.launcher, number(environment, one.processes, 1), number(environment, one.number, 0)};
    // srun --pty bash is a step of one task too.
    if (found.launcher != "srun" || found.processes > 1 || environment("PMIX_RANK") != nullptr) return found;
  }
  return {};
}

bool is_first_process(const Environment& environment) {
  const auto launcher = started_by(environment);
  return !launcher || launcher->number == 0;
}

std::string process_for_launcher(const Environment& environment) {
  const char* const rank = environment("PMI_RANK");
  if (rank == nullptr || environment("SLURM_PROCID") != nullptr) return {};
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) return {};
  return std::string(rank) + " " + std::to_string(::getpid()) + " " + host.data();
}

std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment, const std::string& mpi_library) {
  const int tasks = number(environment, step_tasks, 1);
  const bool other_launcher = environment("PMIX_RANK") != nullptr || environment("OMPI_COMM_WORLD_SIZE") != nullptr;
  if (tasks <= 1 || environment("SLURM_PROCID") == nullptr || other_launcher || !mpi_library.starts_with("Open MPI"))
    return std::nullopt;
  return SeparateWorlds{
      .task = number(environment, "SLURM_PROCID", 0),
      .fact = "srun started " + std::to_string(tasks) + " tasks without PMIx, so they cannot find each other",
      .remedy = "Start them with srun --mpi=pmix"};
}

std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size,
                                              const std::string& mpi_library) {
  const auto launcher = started_by(environment);
  if (world_size != 1 || !launcher || launcher->processes <= 1) return std::nullopt;
  return SeparateWorlds{.task = launcher->number,
                        .fact = "the launcher started " + std::to_string(launcher->processes) +
                                " processes, but each of them is alone in its MPI world",
                        .remedy = "This program uses " + mpi_library +
                                  ": start it with the mpirun of that MPI, or with " + srun_for(mpi_library)};
}

bool started_by_srun(const Environment& environment) {
  return environment("SLURM_STEP_ID") != nullptr && environment("SLURM_PROCID") != nullptr &&
         environment("OMPI_COMM_WORLD_SIZE") == nullptr;
}

int threads_for(const std::vector<std::string>& masks, int rank, double quota) {
  const auto& mine = masks[static_cast<std::size_t>(rank)];
  double share = 0;
  for (std::size_t cpu = 0; cpu < mine.size(); ++cpu) {
    if (mine[cpu] != '1') continue;
    const auto holders = std::count_if(masks.begin(), masks.end(),
                                       [&](const auto& mask) { return cpu < mask.size() && mask[cpu] == '1'; });
    share += 1.0 / static_cast<double>(holders);
  }
  share = std::min(share, quota / static_cast<double>(masks.size()));
  // A sum of halves and thirds may fall just short of a whole number.
  return std::max(1, static_cast<int>(share + 1e-6));
}

bool bound_below_share(const std::vector<std::string>& masks, int rank, int cpus) {
  const int share = cpus / static_cast<int>(masks.size());
  return share > 1 && threads_for(masks, rank) < share;
}

int launcher_cpus() { return static_cast<int>(std::ranges::count(cpu_mask(::getppid()), '1')); }

}  // namespace muster::detail::launch
