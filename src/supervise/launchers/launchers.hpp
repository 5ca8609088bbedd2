// What differs between the programs that start ranks: when each is used, its flags, and what it says when ranks or
// hosts are lost. A file for each. A rank's place by the launcher's variables is in launch/launcher.cpp.
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

/// Folders for files that the launcher leaves behind when it is killed; on one node only, so that they can be removed.
struct Folders {
  std::filesystem::path temporary, shared_memory;  ///< shared_memory empty: the launcher chooses
};

/// One start, as a launcher's flags describe it.
struct Start {
  const SuperviseOptions& options;
  const Environment& environment;
  std::string mpi = {};  ///< what the MPI library that the ranks use says of itself; see comm::mpi_library()
  int ranks = 1;
  std::vector<std::string> hosts = {};             ///< "n1:2" for each that --hosts names and that is not lost
  std::string user = {};                           ///< to log in as; empty: this one
  Hosts lost = {};                                 ///< hosts of the job to leave out
  std::vector<std::string> passed_variables = {};  ///< that ranks on other hosts must get
  Folders folders = {};
};

/// A program that starts the ranks. One object of each kind, which does not change.
class Launcher {
 public:
  /// The batch system whose daemons run the ranks, on this host too, and know which nodes the job has; empty: none.
  std::string batch_system = {};
  std::string program = {};  ///< its name; empty: that of the MPI
  /// The ranks are children of its proxies, on this host too, and their stdout comes through its own.
  bool uses_proxies = false;
  bool signals_early = false;    ///< it passes signals on to ranks that have not loaded muster's library yet
  bool waits_for_hosts = false;  ///< for ever, although ssh has said that it cannot reach one
  bool loses_codes = false;      ///< it may end with 0 once it has passed on a signal, whatever the ranks' codes
  bool leaves_ranks = false;     ///< it lets the others go on when one has failed

  virtual ~Launcher() = default;
  /// True if it can start the ranks of this job with that MPI. Of all that can, the last one in launchers() does.
  virtual bool fits(const SuperviseOptions& options, const Environment& environment, const std::string& mpi) const = 0;
  bool uses_daemons() const noexcept { return !batch_system.empty(); }
  /// Its program. Throws an Error (ExitCode::missing_package) if there is none.
  std::filesystem::path find(const std::string& mpi) const;
  /// The words of the command line behind its own name.
  virtual std::vector<std::string> words(const Start& start) const = 0;
  /// Variables that are set unless the user has set them; arguments of ssh ("-l root") come to the user's.
  virtual Variables settings(const Start&) const { return {}; }

  // A launcher's text is read whatever launcher is used: mpirun may start its daemons by srun, and ranks print some of
  // their MPI's.

  /// True if a line that begins like this may be the launcher's; it is then held back until it is whole.
  virtual bool may_begin(std::string_view begun) const = 0;
  /// Reads a whole line; true if it was the launcher's and is not to be shown.
  virtual bool read_line(std::string_view line, LauncherReport& report) const = 0;
  /// `first_line` is the first one after a line of dashes or equals signs. True if the launcher then says how ranks
  /// have ended or what it could not do, up to the next such line; we report that ourselves.
  virtual bool is_message(std::string_view /*first_line*/) const { return false; }
  /// Reads the text between the two lines.
  virtual void read_message(const std::string& /*text*/, LauncherReport&) const {}

  /// How long it may take to end once a rank has ended the job or has failed; empty without such a limit. It may wait
  /// for a daemon on a node that does not answer. After training the program may go on for as long as it likes.
  std::optional<std::chrono::seconds> patience(const LauncherReport& report) const;
  /// Makes it end ranks that are not processes of this host, or not below it, at once.
  virtual void end(pid_t process) const { ::kill(process, SIGTERM); }
  /// Ends what earlier starts by these processes, on `host`, may have left. Returns variables for the next start.
  virtual Variables end_earlier(const std::set<pid_t>& /*processes*/, const std::string& /*host*/) const { return {}; }
  /// How many nodes the job has, and how many tasks there is room for on them; 0 if it is not known. By Slurm's
  /// variables, where this is a job of Slurm.
  virtual int nodes(const Environment& environment) const;
  virtual int tasks(const Environment& environment) const;
  /// The nodes of the job that new starts should not use.
  virtual Hosts nodes_out_of_service() const { return {}; }
};

extern const Launcher &open_mpi, &hydra, &srun, &flux;
inline std::array<const Launcher*, 4> launchers() { return {&open_mpi, &hydra, &srun, &flux}; }

/// The launcher to use.
struct FoundLauncher {
  const Launcher& kind;
  std::filesystem::path path = {};
  std::string mpi = {};  ///< as in Start
};

/// Returns flux run in a Flux instance, srun in a Slurm job of several nodes, otherwise the mpirun that fits the MPI
/// library. `mpi`: as in Start.
const Launcher& launcher_for(const SuperviseOptions& options, const Environment& environment, const std::string& mpi);
/// The launcher for a job with these options. Throws an Error (ExitCode::missing_package) if there is none.
FoundLauncher find_launcher(const SuperviseOptions& options);

/// "n1,n2"
std::string joined(const std::vector<std::string>& words);

/// True if what has been read of a line may become one that begins with `beginning`.
inline bool may_become(std::string_view begun, std::string_view beginning) {
  return begun.starts_with(beginning) || beginning.starts_with(begun);
}

/// True if `text` contains one of these.
bool contains_any(std::string_view text, const auto& parts) {
  return std::ranges::any_of(parts, [&](auto part) { return text.find(part) != std::string_view::npos; });
}

/// The signal whose strsignal() begins the text; 0 if there is none.
int signal_named(std::string_view text);

}  // namespace muster::detail::supervise
