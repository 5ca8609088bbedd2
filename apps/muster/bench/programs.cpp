#include "programs.hpp"

#include "base/program.hpp"
#include "base/text.hpp"

#include <muster/error.hpp>

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>

namespace muster::bench {
namespace {

std::filesystem::path this_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

/// Returns the mpirun of the MPI that this program was built with; if it is gone, the one in PATH.
std::string find_mpirun(int ranks) {
  if (::access(MUSTER_MPIEXEC, X_OK) == 0) return MUSTER_MPIEXEC;
  for (const auto* name : {"mpirun", "mpiexec"})
    if (auto found = detail::find_program(name); !found.empty()) return found;
  throw Error(ExitCode::missing_package, detail::str("starting ", detail::counted(ranks, "rank")),
              "there is no mpirun, neither " MUSTER_MPIEXEC " nor in PATH",
              "Install Open MPI's programs (Debian: openmpi-bin) or load its module, or start the ranks yourself, as "
              "in srun -n 2 muster bench allreduce");
}

}  // namespace

bool started_by_launcher() {
  for (const auto* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})
    if (std::getenv(name) != nullptr) return true;
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  return tasks != nullptr && std::atoi(tasks) > 1;
}

Command on_ranks(int ranks, const std::vector<std::string>& arguments, const std::string& hosts) {
  std::vector<std::string> words{this_program().string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return under_mpirun(ranks, words, hosts);
}

Command under_mpirun(int ranks, const std::vector<std::string>& words, const std::string& hosts) {
  Command command{.words = {find_mpirun(ranks), "-n", std::to_string(ranks)}};
  if (!hosts.empty()) command.words.insert(command.words.end(), {"--host", hosts});
  command.words.insert(command.words.end(), words.begin(), words.end());
  constexpr std::array<std::pair<const char*, const char*>, 5> settings{{
      {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
      {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
      {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
      {"OMPI_MCA_hwloc_base_binding_policy", "none"},
      {"OMPI_MCA_orte_execute_quiet", "1"},  // mpirun prints no message in addition to muster's own
  }};
  for (const auto& [name, value] : settings)
    if (std::getenv(name) == nullptr) command.environment.emplace_back(name, value);
  return command;
}

Command supervised(int ranks, const std::vector<std::string>& arguments) {
  const auto program = this_program();
  Command command{.words = {program.parent_path() / "muster", "run", "-n", std::to_string(ranks), "--max-failures", "1",
                            "--", program}};
  command.words.insert(command.words.end(), arguments.begin(), arguments.end());
  return command;
}

std::optional<std::string> python_with(const std::vector<std::string>& modules) {
  std::vector<std::filesystem::path> places;
  if (const char* environment = std::getenv("VIRTUAL_ENV"))
    places.push_back(std::filesystem::path(environment) / "bin/python3");
  // This program is build/PRESET/bin/muster-bench, and build/venv may have a Python.
  places.push_back(this_program().parent_path().parent_path().parent_path() / "venv/bin/python3");
  places.emplace_back(detail::find_program("python3"));
  const auto probe = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))";
  for (const auto& python : places) {
    if (::access(python.c_str(), X_OK) != 0) continue;
    Command command{.words = {python.string(), "-c", probe}};
    command.words.insert(command.words.end(), modules.begin(), modules.end());
    if (run(command).code == 0) return python.string();
  }
  return std::nullopt;
}

}  // namespace muster::bench
