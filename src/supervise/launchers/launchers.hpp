// What differs between the programs that start ranks: when each is used, its command line, and its messages about lost
// ranks and hosts. Each launcher has a file of its own. launch/launcher.cpp finds a rank's place by a launcher's
// variables.
#pragma once

#include "base/host.hpp"
#include "muster/supervise.hpp"

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::supervise {

struct LauncherReport;

using Hosts = std::set<std::string>;
using Variables = std::vector<std::pair<std::string, std::string>>;

/// Folders for files that the launcher leaves behind when it is killed. They are only used on one node, where they can
/// be removed.
struct Folders {
  std::filesystem::path temporary, shared_memory;  ///< shared_memory is empty if the launcher must choose
};

/// What a launcher's command line must express about one start.
struct Start {
  const SuperviseOptions& options;
  const Environment& environment;
  std::string mpi = {};             ///< what the MPI library of the ranks says about itself; see comm::mpi_library()
  int ranks = 1;                    ///< of this program
  bool is_further_program = false;  ///< not the first program of the command line
  std::vector<std::string> hosts = {};             ///< "n1:2" for each host of --hosts that is not lost
  std::string user = {};                           ///< user to log in as on other hosts; empty for the present user
  Hosts lost = {};                                 ///< hosts of the job that must not be used
  std::vector<std::string> passed_variables = {};  ///< names of variables that ranks on other hosts must get
  Folders folders = {};
};

/// A program that starts the ranks. There is one constant object for each kind of launcher.
class Launcher {
 public:
  /// The batch system whose daemons run the ranks, also those on this host, and which knows the job's nodes; empty if
  /// there is none.
  std::string batch_system = {};
  std::string program = {};  ///< the program's name; empty if it depends on the MPI library
  /// True if the ranks are children of its proxies, also on this host, and their stdout comes through the launcher's
  /// stdout.
  bool uses_proxies = false;
  bool signals_early = false;    ///< passes signals on even to ranks that have not loaded muster's library yet
  bool waits_for_hosts = false;  ///< waits forever for a host that ssh has reported as unreachable
  bool loses_codes = false;      ///< after it has passed on a signal, may end with 0 whatever the ranks' exit codes are
  bool leaves_ranks = false;     ///< lets the other ranks go on when one has failed

  virtual ~Launcher() = default;
  /// True if it can start the ranks of this job with this MPI library. If several can, the last one in launchers() is
  /// used.
  virtual bool fits(const SuperviseOptions& options, const Environment& environment, const std::string& mpi) const = 0;
  bool uses_daemons() const noexcept { return !batch_system.empty(); }
  /// Returns the path of the program. Throws an Error (ExitCode::missing_package) if it is not found.
  std::filesystem::path find(const std::string& mpi) const;
  /// Returns the arguments of the program for this start, up to the program that the ranks run.
  virtual std::vector<std::string> words(const Start& start) const = 0;
  /// Returns variables to set for the program, unless the user has set them. Arguments of ssh ("-l root") are added to
  /// the user's.
  virtual Variables settings(const Start&) const { return {}; }

  // The following functions are called for every launcher, whichever is used: mpirun may start its daemons through
  // srun, and ranks print some messages of their MPI library themselves.

  /// True if a line with this beginning may be a message of the launcher; then it is not shown until it is complete.
  virtual bool may_begin(std::string_view begun) const = 0;
  /// Reads a complete line into the report. Returns true if the line is the launcher's and must not be shown.
  virtual bool read_line(std::string_view line, LauncherReport& report) const = 0;
  /// True if a message between two rules (lines of dashes or equals signs) that begins with `first_line` is about the
  /// end of ranks or about something that the launcher could not do. Such a message is not shown; the supervisor
  /// reports its contents.
  virtual bool is_message(std::string_view /*first_line*/) const { return false; }
  /// Reads the text between the two rules into the report.
  virtual void read_message(const std::string& /*text*/, LauncherReport&) const {}

  /// Returns how long the launcher may take to end once a rank has ended the job or was lost, or has failed (if
  /// leaves_ranks is true), since it may wait for a daemon on a node that does not answer; none if there is no limit.
  /// After its training, a program may run as long as it likes.
  std::optional<std::chrono::seconds> patience(const LauncherReport& report) const;
  /// Makes the launcher end, at once, the ranks that are not its descendants on this host.
  virtual void end(pid_t process) const { ::kill(process, SIGTERM); }
  /// Ends what earlier starts, whose launchers were `processes` on `host`, may have left. Returns variables for the
  /// next start.
  virtual Variables end_earlier(const std::set<pid_t>& /*processes*/, const std::string& /*host*/) const { return {}; }
  /// Return the number of nodes of the job, and the number of tasks that fit on them; 0 if unknown. The default reads
  /// Slurm's variables.
  virtual int nodes(const Environment& environment) const;
  virtual int tasks(const Environment& environment) const;
  /// Returns the nodes of the job that new starts must not use.
  virtual Hosts nodes_out_of_service() const { return {}; }
};

extern const Launcher &open_mpi, &hydra, &srun, &flux;
inline std::array<const Launcher*, 4> launchers() { return {&open_mpi, &hydra, &srun, &flux}; }

/// The launcher that is used for a job.
struct FoundLauncher {
  const Launcher& kind;
  std::filesystem::path path = {};
  std::string mpi = {};  ///< see Start::mpi
};

/// Without --hosts, returns flux run in a Flux instance, but not inside a task of it; srun in a Slurm job that has
/// several nodes or Cray MPICH; otherwise the mpirun or mpiexec that belongs to the MPI library. `mpi`: see Start::mpi.
const Launcher& launcher_for(const SuperviseOptions& options, const Environment& environment, const std::string& mpi);
/// Finds the launcher for a job with these options. Throws an Error (ExitCode::missing_package) if there is none.
FoundLauncher find_launcher(const SuperviseOptions& options);

/// Returns the words joined by commas: "n1,n2".
std::string joined(const std::vector<std::string>& words);

/// True if a line whose first bytes are `begun` may become a line that begins with `beginning`.
inline bool may_become(std::string_view begun, std::string_view beginning) {
  return begun.starts_with(beginning) || beginning.starts_with(begun);
}

/// True if `text` contains one of `parts`.
bool contains_any(std::string_view text, const auto& parts) {
  return std::ranges::any_of(parts, [&](auto part) { return text.find(part) != std::string_view::npos; });
}

/// Returns the signal whose strsignal() is at the beginning of the text; 0 if there is none.
int signal_named(std::string_view text);

}  // namespace muster::detail::supervise
