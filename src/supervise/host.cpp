#include "supervise/host.hpp"

#include "base/program.hpp"
#include "comm/mpi_scope.hpp"
#include "muster/error.hpp"
#include "supervise/launch_command.hpp"

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

namespace muster::detail::supervise {

namespace fs = std::filesystem;

Launcher find_launcher(const SuperviseOptions& options) {
  Launcher launcher{.mpi = comm::mpi_library()};
  launcher.kind = launcher_kind(options, ::getenv, launcher.mpi);
  if (launcher.kind == Launcher::Kind::srun) {
    launcher.path = find_program("srun");
    if (!launcher.path.empty()) return launcher;
    throw Error(ExitCode::missing_package, "starting the ranks", "this is a job of Slurm and there is no srun in PATH",
                "Load its module, or give --hosts");
  }
  const bool hydra = launcher.kind == Launcher::Kind::hydra;
  const std::array<std::string, 2> names{hydra ? "mpiexec.hydra" : "mpirun", "mpiexec"};
  std::vector<std::string> candidates{MUSTER_MPIEXEC, names[0], names[1]};
  if (hydra) std::swap(candidates[0], candidates[1]);  // whose name says what it is
  // The one beside the library that the ranks use is sure to fit it.
  if (const fs::path library = comm::mpi_library_file(); library.is_absolute())
    for (const auto& name : {names[1], names[0]})
      candidates.insert(candidates.begin(), (library.parent_path().parent_path() / "bin" / name).string());
  for (const auto& name : candidates)
    if (launcher.path = find_program(name); !launcher.path.empty()) return launcher;
  throw Error(ExitCode::missing_package, "starting the ranks",
              "there is no " + names[0] + ", neither " MUSTER_MPIEXEC " nor in PATH",
              "Install the programs of the MPI (Debian: openmpi-bin or mpich) or load its module");
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::vector<std::string> flag_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (const std::string_view text = *entry; text.starts_with("MUSTER_"))
      names.emplace_back(text.substr(0, text.find('=')));
  return names;
}

bool has_input() {
  struct stat input {};
  if (::fstat(STDIN_FILENO, &input) != 0) return false;
  if (S_ISREG(input.st_mode)) return ::lseek(STDIN_FILENO, 0, SEEK_CUR) < input.st_size;
  int bytes = 0;
  return S_ISFIFO(input.st_mode) && ::ioctl(STDIN_FILENO, FIONREAD, &bytes) == 0 && bytes > 0;
}

}  // namespace muster::detail::supervise
