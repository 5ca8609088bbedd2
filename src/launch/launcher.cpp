#include "launch/launcher.hpp"

#include "base/cpus.hpp"
#include "base/host.hpp"
#include "base/text.hpp"
#include "launch/supervised.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

namespace muster::detail::launch {
namespace {

int number(const Environment& environment, const char* name, int fallback) {
  const char* const value = environment(name);
  return value == nullptr || *value == '\0' ? fallback : std::atoi(value);
}

/// The variables in which a launcher gives a process the number of processes and the process's own number.
struct LauncherVariables {
  const char* launcher;
  const char* processes;
  const char* number;
};

constexpr const char* step_tasks = "SLURM_STEP_NUM_TASKS";

/// The first launcher whose variable is set counts. srun comes last, since other launchers may start their daemons by
/// srun. PALS gives only the number of processes on this node.
constexpr std::array<LauncherVariables, 7> launchers{{{"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                                      {"mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                                                      {"mpiexec", "PMI_SIZE", "PMI_RANK"},
                                                      {"PALS", "PALS_LOCAL_SIZE", "PALS_RANKID"},
                                                      {"jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"},
                                                      {"Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
                                                      {"srun", step_tasks, "SLURM_PROCID"}}};

/// The beginnings of the variables that Open MPI, PMIx and Hydra set for a process.
constexpr std::array<std::string_view, 8> launcher_prefixes{
    "OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "OMPI_MCA_ess_base_", "ORTE_", "PMIX_", "PMI_", "OMPI_APP_CTX_", "HYDI_"};
constexpr std::array<std::string_view, 11> launcher_names{"OMPI_ARGV",
                                                          "OMPI_COMMAND",
                                                          "OMPI_FILE_LOCATION",
                                                          "OMPI_FIRST_RANKS",
                                                          "OMPI_NUM_APP_CTX",
                                                          "OMPI_UNIVERSE_SIZE",
                                                          "OMPI_MCA_ess",
                                                          "OMPI_MCA_initial_wdir",
                                                          "OMPI_MCA_mpi_oversubscribe",
                                                          "OMPI_MCA_pmix",
                                                          "OMPI_MCA_shmem_RUNTIME_QUERY_hint"};
/// The beginnings of variables that users set themselves.
constexpr std::array<std::string_view, 5> user_prefixes{"PMIX_MCA_", "OMPI_MCA_orte_tmpdir_base",
                                                        "OMPI_MCA_orte_base_help_", "OMPI_MCA_orte_default_",
                                                        "OMPI_MCA_orte_keep_fqdn_hostnames"};
/// The beginnings of variables that srun sets for the processes of a step, but not for a batch script.
constexpr std::array<std::string_view, 4> step_prefixes{"SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_SRUN_"};

bool begins_with_any(std::string_view name, const auto& beginnings) {
  return std::ranges::any_of(beginnings, [&](auto beginning) { return name.starts_with(beginning); });
}

/// The variables in `names` that launchers set for their processes.
std::vector<std::string> variables_of_launchers(const std::vector<std::string>& names) {
  std::vector<std::string> found;
  for (const auto& name : names)
    if ((begins_with_any(name, launcher_prefixes) && !begins_with_any(name, user_prefixes)) ||
        std::ranges::find(launcher_names, name) != launcher_names.end())
      found.push_back(name);
  return found;
}

/// True if that process is a launcher, or a daemon of one.
bool is_launcher(pid_t process) {
  constexpr std::array<std::string_view, 11> programs{"mpirun",          "mpiexec", "orterun",   "orted",
                                                      "prterun",         "prte",    "prted",     "slurmstepd",
                                                      "hydra_pmi_proxy", "palsd",   "flux-shell"};
  return std::ranges::find(programs, first_line(str("/proc/", process, "/comm"))) != programs.end();
}

/// True if a launcher has started this process or one of its ancestors, such as a script.
bool is_below_launcher() {
  for (auto process = parent_of(::getpid()); process > 1; process = parent_of(process))
    if (is_launcher(process)) return true;
  return false;
}

}  // namespace

std::vector<std::string> misleading_variables(const std::vector<std::string>& names, const Environment& environment,
                                              const std::string& mpi_library,
                                              const std::function<bool(const std::string& uri)>& answers) {
  std::vector<std::string> servers, found;
  for (const auto& name : names)
    if (name.starts_with("PMIX_SERVER_URI") && environment(name.c_str()) != nullptr) servers.push_back(name);
  std::ranges::copy_if(servers, std::back_inserter(found),
                       [&](const auto& name) { return !answers(environment(name.c_str())); });
  // A launcher sets only the variables that its version of PMIx knows; others may remain from a job that is over.
  const bool all_dead = !servers.empty() && found.size() == servers.size();
  if (all_dead) found = variables_of_launchers(names);
  const bool has_pmi = environment("PMIX_RANK") != nullptr || environment("PMI_RANK") != nullptr;
  const bool by_other = environment("OMPI_COMM_WORLD_SIZE") != nullptr;
  const bool is_free = all_dead || (!has_pmi && !by_other);
  if (is_free && environment("SLURM_STEP_ID") != nullptr && mpi_library.starts_with("Open MPI") &&
      number(environment, step_tasks, 1) <= 1)
    std::ranges::copy_if(names, std::back_inserter(found),
                         [](const auto& name) { return begins_with_any(name, step_prefixes); });
  return found;
}

bool server_answers(const std::string& uri) {
  constexpr std::string_view scheme = "tcp4://";
  constexpr int limit_ms = 1000;
  const auto at = uri.find(scheme), colon = uri.rfind(':');
  if (at == std::string::npos || colon <= at + scheme.size()) return true;  // not reached by TCP
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::atoi(uri.c_str() + colon + 1)));
  const auto host = uri.substr(at + scheme.size(), colon - at - scheme.size());
  if (::inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) return true;
  const int end = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (end < 0) return true;
  int error = ::connect(end, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
  pollfd ready{end, POLLOUT, 0};
  socklen_t size = sizeof error;
  if (error == EINPROGRESS && ::poll(&ready, 1, limit_ms) > 0) ::getsockopt(end, SOL_SOCKET, SO_ERROR, &error, &size);
  ::close(end);
  return error != ECONNREFUSED;
}

void forget_other_launchers(const std::string& mpi_library, bool even_own) {
  const auto names = variable_names();
  auto found = misleading_variables(names, ::getenv, mpi_library, [](const std::string& uri) {
    return is_launcher(::getppid()) || server_answers(uri);  // this process's own launcher is alive
  });
  const auto launcher = started_by(::getenv);
  if (even_own && launcher && launcher->processes == 1)
    std::ranges::copy(variables_of_launchers(names), std::back_inserter(found));
  for (const auto& name : found) ::unsetenv(name.c_str());
}

std::string launcher_of(const std::string& mpi_library) {
  const auto is = [&](std::string_view name) { return mpi_library.find(name) != std::string::npos; };
  return is("MPICH") || is("Intel") || is("MVAPICH") ? "mpiexec.hydra" : "mpirun";
}

std::string srun_plugin(const std::string& mpi_library) {
  if (mpi_library.find("CRAY") != std::string::npos) return "cray_shasta";
  return launcher_of(mpi_library) == "mpirun" ? "pmix" : "pmi2";
}

std::optional<StartedBy> started_by(const Environment& environment) {
  for (const auto& one : launchers) {
    if (environment(one.processes) == nullptr) continue;
    StartedBy found{one.launcher, number(environment, one.processes, 1), number(environment, one.number, 0),
                    one.processes};
    // A shell of srun --pty bash is a step of one task, too, and does not count.
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
  const auto host = host_name();
  if (rank == nullptr || environment("SLURM_PROCID") != nullptr || host.empty()) return {};
  return str(rank, " ", ::getpid(), " ", host);
}

std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment, const std::string& mpi_library) {
  const int tasks = number(environment, step_tasks, 1);
  const bool other_launcher = environment("PMIX_RANK") != nullptr || environment("OMPI_COMM_WORLD_SIZE") != nullptr;
  if (tasks <= 1 || environment("SLURM_PROCID") == nullptr || other_launcher || !mpi_library.starts_with("Open MPI"))
    return std::nullopt;
  return SeparateWorlds{.is_printed_here = number(environment, "SLURM_PROCID", 0) == 0 || !is_below_launcher(),
                        .fact = str("srun started ", tasks, " tasks without PMIx, so they cannot find each other"),
                        .remedy = "Start them with srun --mpi=pmix"};
}

std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size,
                                              const std::string& mpi_library) {
  const auto launcher = started_by(environment);
  if (world_size != 1 || !launcher || launcher->processes <= 1) return std::nullopt;
  return SeparateWorlds{
      .is_printed_here = launcher->number == 0 || !is_below_launcher(),
      .fact =
          str("the launcher started ", launcher->processes, " processes, but each of them is alone in its MPI world"),
      .remedy = "This program uses " + mpi_library +
                ": start it with the mpirun of that MPI, or with srun --mpi=" + srun_plugin(mpi_library) +
                ". If nothing was launched, unset " + launcher->variable + ", which another job has left"};
}

bool started_by_srun(const Environment& environment) {
  return environment("SLURM_STEP_ID") != nullptr && environment("SLURM_PROCID") != nullptr &&
         environment("OMPI_COMM_WORLD_SIZE") == nullptr && environment("MPI_LOCALRANKID") == nullptr;
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
