#include "supervise/launchers/launchers.hpp"

#include "base/program.hpp"
#include "comm/mpi_scope.hpp"
#include "launch/launcher.hpp"
#include "muster/error.hpp"
#include "supervise/launcher_output.hpp"
#include "supervise/slurm.hpp"

#include <cstring>

namespace muster::detail::supervise {

namespace fs = std::filesystem;

fs::path Launcher::find(const std::string& mpi) const {
  if (uses_daemons()) {
    if (auto path = find_program(program); !path.empty()) return path;
    throw Error(ExitCode::missing_package, "starting the ranks",
                "this is a job of " + batch_system + " and there is no " + program + " in PATH",
                "Load its module, or give --hosts");
  }
  const auto name = launch::launcher_of(mpi);
  std::vector<std::string> candidates{MUSTER_MPIEXEC, name, "mpiexec"};
  // A name such as mpiexec.hydra says which MPI the launcher belongs to, so it is tried first.
  if (name != "mpirun") std::swap(candidates[0], candidates[1]);
  // The launcher beside the MPI library that the ranks use is the right one.
  if (const fs::path library = comm::mpi_library_file(); library.is_absolute())
    for (const auto& beside : {std::string("mpiexec"), name})
      candidates.insert(candidates.begin(), (library.parent_path().parent_path() / "bin" / beside).string());
  for (const auto& candidate : candidates)
    if (auto path = find_program(candidate); !path.empty()) return path;
  throw Error(ExitCode::missing_package, "starting the ranks",
              "there is no " + name + ", neither " MUSTER_MPIEXEC " nor in PATH",
              "Install the programs of the MPI (Debian: openmpi-bin or mpich) or load its module");
}

const Launcher& launcher_for(const SuperviseOptions& options, const Environment& environment, const std::string& mpi) {
  const auto all = launchers();
  return **std::find_if(all.rbegin(), all.rend(),
                        [&](const auto* one) { return one->fits(options, environment, mpi); });
}

FoundLauncher find_launcher(const SuperviseOptions& options) {
  const auto mpi = comm::mpi_library();
  const auto& launcher = launcher_for(options, ::getenv, mpi);
  return {launcher, launcher.find(mpi), mpi};
}

std::optional<std::chrono::seconds> Launcher::patience(const LauncherReport& report) const {
  // The other ranks cannot go on either, but may have something to report.
  if (report.failed_rank && leaves_ranks) return std::chrono::seconds(1);
  if (report.leaving || report.lost_rank) return std::chrono::seconds(10);
  return {};
}

int Launcher::nodes(const Environment& environment) const {
  return environment("SLURM_JOB_ID") == nullptr ? 0 : nodes_of_job(environment);
}

int Launcher::tasks(const Environment& environment) const {
  return environment("SLURM_JOB_ID") == nullptr ? 0 : all_tasks_of_job(environment);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

int signal_named(std::string_view text) {
  for (int signal = 1; signal < 32; ++signal)
    if (text.starts_with(::strsignal(signal))) return signal;
  return 0;
}

}  // namespace muster::detail::supervise
