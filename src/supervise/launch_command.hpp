// The command that starts the ranks, as a pure function of what was asked for and of the surroundings.
#pragma once

#include "muster/supervise.hpp"

#include <ctime>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::supervise {

using Hosts = std::set<std::string>;
using Environment = std::function<const char*(const char*)>;  ///< as std::getenv

struct LaunchCommand {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> environment;  ///< set beside what this process has
};

/// Which launcher there is.
struct Launcher {
  enum class Kind { mpirun, srun };
  Kind kind = Kind::mpirun;
  std::filesystem::path path;
};

/// srun in a Slurm job of several nodes, else mpirun.
Launcher::Kind launcher_kind(const SuperviseOptions& options, const Environment& environment);
/// How many ranks are wanted; `cpus` are those that this process may run on.
int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cpus);
/// How many of `ranks` there is room for without the hosts that were lost; all of them where no host is known.
int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment);
/// Whether mpirun has to log in to another host; `here` is this one's name.
bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment);
/// An Error (ExitCode::usage) for what cannot be asked for.
void check(const SuperviseOptions& options, int ranks, const Environment& environment);

/// What the ranks are told of their supervisor, see launch/supervised.hpp.
struct Introduction {
  std::string id = {}, started = {};
  std::time_t begin = 0;  ///< of the first start
  int full_workers = 0;
};

/// Where the launcher puts what it leaves behind when it is killed; on one node, so that it can be removed.
struct Folders {
  std::filesystem::path temporary, shared_memory;  ///< the latter empty: wherever it likes
};

/// `ranks` on all hosts but the lost ones. `flag_variables`: the names of variables that ranks on other hosts get.
LaunchCommand launch_command(const Launcher& launcher, const SuperviseOptions& options, int ranks, const Hosts& lost,
                             const Introduction& introduction, const Folders& folders, const Environment& environment,
                             const std::vector<std::string>& flag_variables = {});

}  // namespace muster::detail::supervise
