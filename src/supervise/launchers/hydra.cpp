// Hydra, the mpiexec of MPICH. Intel MPI and MVAPICH, which derive from MPICH, have it, too.
#include "launch/launcher.hpp"
#include "supervise/launcher_output.hpp"
#include "supervise/launchers/launchers.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>

namespace muster::detail::supervise {
namespace {

// Hydra reports a rank that a signal has ended between two lines of equals signs. MPICH names the process, Intel MPI
// also the rank:
//   =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
//   =   PID 4711 RUNNING AT n1                 or: =   RANK 1 PID 4711 RUNNING AT n1
//   =   EXIT CODE: 9                           or: =   KILLED BY SIGNAL: 9 (Killed)
//   …
//   YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
constexpr std::array<std::string_view, 3> advice{
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ", "This typically refers to a problem with your application.",
    "Please see the FAQ page for debugging suggestions"};
/// Lines from Hydra's own processes begin with "[mpiexec@n1] " or "[proxy:0:1@n2] ".
constexpr std::array<std::string_view, 2> parts{"[mpiexec@", "[proxy:"};
constexpr std::string_view cannot_execute = "execvp error on file ";

/// Returns the rank of a process on a host, as the ranks have told; none if no rank has told this process.
std::optional<int> rank_of(const LauncherReport& report, int pid, const std::string& host) {
  const auto label = [](const std::string& name) { return name.substr(0, name.find('.')); };
  for (const auto& process : report.processes)
    if (process.pid == pid && label(process.host) == label(host)) return process.rank;
  return {};
}

/// Reads "[proxy:0:1@n2] HYDU_create_process (launch.c:73): execvp error on file ./fit (No such …)". Returns false for
/// all other lines of Hydra's processes, which are shown.
bool read_part(const std::string& line, LauncherReport& report) {
  const auto program = line.find(cannot_execute);
  if (program == std::string::npos) return false;
  report.no_program = true;
  report.keep_error("starting " + line.substr(program + cannot_execute.size()));
  return true;
}

class Hydra : public Launcher {
 public:
  Hydra() { uses_proxies = signals_early = waits_for_hosts = loses_codes = true; }

  bool fits(const SuperviseOptions&, const Environment&, const std::string& mpi) const override {
    return launch::launcher_of(mpi) == "mpiexec.hydra";
  }

  std::vector<std::string> words(const Start& start) const override {
    // By default, Hydra passes all variables on, also to other hosts.
    std::vector<std::string> words{"-n", std::to_string(start.ranks)};
    // It refuses hosts that are named twice.
    if (!start.hosts.empty() && !start.is_further_program) words.insert(words.end(), {"-hosts", joined(start.hosts)});
    return words;
  }

  Variables settings(const Start& start) const override {
    if (!start.user.empty()) return {{"HYDRA_LAUNCHER_EXTRA_ARGS", "-l " + start.user}};
    if (!start.hosts.empty()) return {};
    // In a Slurm job, Hydra would start the ranks of this host through srun.
    return {{"HYDRA_LAUNCHER", "fork"}, {"HYDRA_RMK", "user"}, {"I_MPI_HYDRA_BOOTSTRAP", "fork"}};
  }

  bool may_begin(std::string_view begun) const override {
    const auto may_be = [&](std::string_view beginning) { return may_become(begun, beginning); };
    return may_be("Abort(") || std::ranges::any_of(advice, may_be) || std::ranges::any_of(parts, may_be);
  }

  bool read_line(std::string_view line, LauncherReport& report) const override {
    if (std::ranges::any_of(parts, [&](auto part) { return line.starts_with(part); }))
      return read_part(std::string(line), report);
    // MPICH's line about MPI_Abort is not shown; its lines about other fatal errors are.
    if (line.starts_with("Abort(") && line.find("application called MPI_Abort") != std::string_view::npos) return true;
    return std::ranges::any_of(advice, [&](auto begin) { return line.starts_with(begin); });
  }

  bool is_message(std::string_view first_line) const override {
    return first_line.find("BAD TERMINATION OF ONE") != std::string_view::npos;
  }

  void read_message(const std::string& text, LauncherReport& report) const override {
    if (report.lost_rank) return;
    std::array<char, 256> host{};
    int rank = -1, pid = 0, signal = 0;
    const auto process = text.find(" RUNNING AT "), line = text.rfind('\n', process);
    if (process == std::string::npos || line == std::string::npos) return;
    const char* const begin = text.c_str() + line + 1;
    if (std::sscanf(begin, "= RANK %d PID %d RUNNING AT %255s", &rank, &pid, host.data()) != 3 &&
        std::sscanf(begin, "= PID %d RUNNING AT %255s", &pid, host.data()) != 2)
      return;
    for (const std::string_view name : {"EXIT CODE: ", "KILLED BY SIGNAL: "})
      if (const auto at = text.find(name); at != std::string::npos && signal == 0)
        signal = std::atoi(text.c_str() + at + name.size());
    report.lost_rank = {rank >= 0 ? rank : rank_of(report, pid, host.data()).value_or(-1), host.data(), signal};
  }
};

}  // namespace

const Launcher& hydra = Hydra();

}  // namespace muster::detail::supervise
