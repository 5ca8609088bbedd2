#include "supervise/launchers/launchers.hpp"

#include "base/program.hpp"
#include "comm/mpi_scope.hpp"
#include "launch/launcher.hpp"
#include "muster/error.hpp"
#include "supervise/launcher_output.hpp"

#include <signal.h>

#include <cstring>

namespace muster::detail::supervise {

namespace fs = std::filesystem;

fs::path Launcher::find(const std::string& mpi) const {
  const auto name = launch::launcher_of(mpi);
  std::vector<std::string> candidates{MUSTER_MPIEXEC, name, "mpiexec"};
  if (name != "mpirun") std::swap(candidates[0], candidates[1]);  // its name says what it is
  // The one beside the library that the ranks use is sure to fit it.
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
  const Launcher* last = nullptr;
  for (const auto* launcher : launchers())
    if (launcher->fits(options, environment, mpi)) last = launcher;
  return *last;
}

FoundLauncher find_launcher(const SuperviseOptions& options) {
  const auto mpi = comm::mpi_library();
  const auto& launcher = launcher_for(options, ::getenv, mpi);
  return {launcher, launcher.find(mpi), mpi};
}

std::optional<std::chrono::seconds> Launcher::patience(const LauncherReport& report) const {
  if (report.leaving || report.lost_rank) return std::chrono::seconds(10);
  return {};
}

void Launcher::ask_to_stop(pid_t process) const { ::kill(process, SIGUSR1); }
void Launcher::end(pid_t process) const { ::kill(process, SIGTERM); }

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
