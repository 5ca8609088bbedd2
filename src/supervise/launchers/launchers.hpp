// What differs between the programs that start ranks: their flags, and what they say when ranks or hosts are lost. A
// file for each. A rank's place by the launcher's variables is in launch/launcher.cpp.
#pragma once

#include "muster/supervise.hpp"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::supervise {

struct LauncherReport;

using Hosts = std::set<std::string>;
using Environment = std::function<const char*(const char*)>;  ///< like std::getenv
using Variables = std::vector<std::pair<std::string, std::string>>;

/// The launcher to use. `mpi`: what the MPI library that the ranks use says of itself; see comm::mpi_library().
struct Launcher {
  enum class Kind { open_mpi, hydra, srun };
  Kind kind = Kind::open_mpi;
  std::filesystem::path path = {};
  std::string mpi = {};
};

struct LaunchCommand {
  std::vector<std::string> words;
  Variables environment;  ///< added to this process's environment
};

/// Folders for files that the launcher leaves behind when it is killed; on one node only, so that they can be removed.
struct Folders {
  std::filesystem::path temporary, shared_memory;  ///< shared_memory empty: the launcher chooses
};

/// One start, as a launcher's flags describe it.
struct Start {
  int ranks = 1;
  std::vector<std::string> hosts = {};             ///< "n1:2" for each that --hosts names and that is not lost
  std::string user = {};                           ///< to log in as; empty: this one
  Hosts lost = {};                                 ///< hosts of the job to leave out
  int nodes = 0;                                   ///< of the Slurm job to use; 0: all
  int het_group = -1;                              ///< the component of a heterogeneous Slurm job; -1 in others
  std::vector<std::string> passed_variables = {};  ///< that ranks on other hosts must get
  Folders folders = {};
};

/// "n1,n2"
std::string joined(const std::vector<std::string>& words);

// Each of these namespaces has the same functions.
//   add_words():  appends the flags of a start
//   settings():   variables that are set unless the user has set them; arguments of ssh ("-l root") come to the user's
//   may_begin():  true if a line that begins like this may be the launcher's; it is then held back until it is whole
//   read_line():  reads a whole line; true if it was the launcher's and is not to be shown
//   is_message(): `first_line` is the first one after a line of dashes or equals signs. True if the launcher then says
//                 how ranks have ended or what it could not do, up to the next such line; we report that ourselves
//   read_message(): reads the text between the two lines
// A launcher's text is read whatever launcher is used: mpirun may start its daemons by srun, and ranks print some of
// their MPI's.

namespace open_mpi {
void add_words(std::vector<std::string>& words, const Launcher& launcher, const Start& start);
Variables settings(const Launcher& launcher, const Start& start);
bool may_begin(std::string_view begun);
bool read_line(std::string_view line, LauncherReport& report);
bool is_message(std::string_view first_line);
void read_message(const std::string& text, LauncherReport& report);
}  // namespace open_mpi

namespace hydra {
void add_words(std::vector<std::string>& words, const Launcher& launcher, const Start& start);
Variables settings(const Launcher& launcher, const Start& start);
bool may_begin(std::string_view begun);
bool read_line(std::string_view line, LauncherReport& report);
bool is_message(std::string_view first_line);
void read_message(const std::string& text, LauncherReport& report);
}  // namespace hydra

namespace srun {
void add_words(std::vector<std::string>& words, const Launcher& launcher, const Start& start);
Variables settings(const Launcher& launcher, const Start& start);
bool may_begin(std::string_view begun);
/// Slurm repeats some of its lines: true for the second of two that are equal, too.
bool read_line(std::string_view line, LauncherReport& report);
}  // namespace srun

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
