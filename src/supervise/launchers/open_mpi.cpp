// mpirun of Open MPI: version 4.1, whose parts are called ORTE, and version 5, where they are called PRTE.
#include "supervise/launcher_output.hpp"
#include "supervise/launchers/launchers.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

namespace muster::detail::supervise {
namespace {

// mpirun prints messages between two lines of dashes. If a message is about the ranks' end, its first line contains one
// of these.
constexpr std::array<std::string_view, 6> rank_end_messages{
    "Primary job ",          " noticed that process rank ",      " detected that one ",
    "MPI_ABORT was invoked", " has exited due to process rank ", "An MPI communication peer process has unexpectedly"};
// A message about something that mpirun could not do has a first line "NAME was unable to …" (mpirun may have another
// name), or a first line that begins with one of these, in version 5 with PRTE instead of ORTE.
constexpr std::string_view unable_to = " was unable to ";
constexpr std::array<std::string_view, 8> trouble_messages{"There are not enough slots",
                                                           "ORTE has lost",
                                                           "ORTE does not know",
                                                           "A daemon",
                                                           "An ORTE daemon",
                                                           "All nodes which are allocated",
                                                           "One or more daemons could not be ordered to ",
                                                           "Open MPI tried to fork a new process via the \"execve\""};
constexpr std::array<std::string_view, 2> fork_failures{"Open MPI tried to fork", "PRTE tried to fork"};
constexpr std::array<std::string_view, 7> ignored_phrases{
    ": Forwarding signal ",     ": abort is already in progress",   " sent help message help-",
    "orte_base_help_aggregate", " total processes failed to start", " total processes killed",
    " ORTE_ERROR_LOG: "};

/// Returns the line with the first "PRTE", the name since version 5, replaced by "ORTE".
std::string by_old_names(std::string_view line) {
  std::string text(line);
  if (const auto prte = text.find("PRTE"); prte != std::string::npos) text.replace(prte, 4, "ORTE");
  return text;
}

bool is_trouble(std::string_view first_line) {
  const auto old = by_old_names(first_line);
  const std::string_view line = old;
  return line.substr(std::min(line.size(), line.find(' '))).starts_with(unable_to) ||
         first_line.starts_with(fork_failures[1]) ||
         std::ranges::any_of(trouble_messages, [&](auto begin) { return line.starts_with(begin); });
}

/// Returns the first paragraph, without its last sentence if that only introduces a list ("This usually is caused
/// by:").
std::string first_sentences(const std::string& block) {
  auto text = block.substr(0, block.find("\n\n"));
  if (const auto item = text.find("\n* "); item != std::string::npos) text.erase(item);
  std::replace(text.begin(), text.end(), '\n', ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  if (const auto stop = text.rfind(". "); text.ends_with(':') && stop != std::string::npos) text.erase(stop);
  text.erase(text.find_last_not_of(" .:") + 1);
  return text;
}

/// Returns "n2" if there is a line "Remote daemon: [[1,0],1] on node n2", otherwise an empty text.
std::string remote_node_in(const std::string& text) {
  const auto remote = text.find("Remote daemon");
  const auto node = remote == std::string::npos ? remote : text.find(" on node ", remote);
  return node == std::string::npos ? "" : text.substr(node + 9, text.find('\n', node) - node - 9);
}

/// Returns the value of an entry: "./fit" for "  Application name:  ./fit".
std::string entry_of(const std::string& text, std::string_view name) {
  const auto at = text.find(name);
  if (at == std::string::npos) return {};
  const auto begin = std::min(text.size(), text.find_first_not_of(' ', at + name.size()));
  return text.substr(begin, text.find('\n', begin) - begin);
}

/// Returns the rank in "Process name: [[35,1],2]", or in version 5 in "[prterun-n1-4711@1,2]".
std::optional<int> failed_rank_in(const std::string& text) {
  const auto name = entry_of(text, "Process name: ");
  const auto comma = name.rfind(',');
  int rank = 0;
  if (comma == std::string::npos || std::sscanf(name.c_str() + comma, ",%d", &rank) != 1) return {};
  return rank;
}

class Mpirun : public Launcher {
 public:
  bool fits(const SuperviseOptions&, const Environment&, const std::string&) const override { return true; }

  std::vector<std::string> words(const Start& start) const override {
    std::vector<std::string> words{"-n", std::to_string(start.ranks)};
    if (start.hosts.empty()) return words;
    words.insert(words.end(), {"--host", joined(start.hosts)});
    for (const auto& name : start.passed_variables) words.insert(words.end(), {"-x", name});
    return words;
  }

  Variables settings(const Start& start) const override {
    // These make mpirun run as root, allow more ranks than cores, bind no ranks, and end all ranks when the first one
    // ends.
    Variables settings{{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
    int version = 0;
    const bool is_5 = std::sscanf(start.mpi.c_str(), "Open MPI v%d", &version) == 1 && version >= 5;
    const auto set = [&](const char* name, const char* since_5, const std::string& value) {
      settings.emplace_back(is_5 ? since_5 : name, value);
    };
    set("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy",
        is_5 ? "slot:oversubscribe" : "1");
    set("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy", "none");
    set("OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout", "0");
    if (!start.user.empty()) set("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args", "-l " + start.user);
    if (!start.hosts.empty()) return settings;
    const auto& [temporary, shared] = start.folders;
    set("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", temporary.string());
    if (!shared.empty())
      set("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory", shared.string());
    return settings;
  }

  bool may_begin(std::string_view begun) const override {
    const auto may_be = [&](std::string_view beginning) { return may_become(begun, beginning); };
    return may_be("mpirun: ") || may_be("mpiexec: ") || may_be("prterun: ") || begun.front() == '[' ||
           (begun.front() >= '0' && begun.front() <= '9');
  }

  bool read_line(std::string_view line, LauncherReport&) const override {
    return contains_any(by_old_names(line), ignored_phrases);
  }

  bool is_message(std::string_view first_line) const override {
    return contains_any(first_line, rank_end_messages) || is_trouble(first_line);
  }

  void read_message(const std::string& text, LauncherReport& report) const override {
    std::array<char, 256> host{};
    int rank = 0, pid = 0, signal = 0;
    if (std::sscanf(text.c_str(), "%*s noticed that process rank %d with PID %d on node %255s exited on signal %d",
                    &rank, &pid, host.data(), &signal) == 4) {
      if (!report.lost_rank) report.lost_rank = {rank, host.data(), signal};
      return;
    }
    if (std::sscanf(text.c_str(), "%*s has exited due to process rank %d with PID", &rank) == 1) {
      report.exited_improperly = text.find("exiting improperly") != text.npos;
      if (!report.failed_rank) report.failed_rank = rank;
    }
    if (!report.failed_rank) report.failed_rank = failed_rank_in(text);
    if (!is_trouble(text.substr(0, text.find('\n')))) return;
    if (const auto node = remote_node_in(text); !node.empty()) report.lost_host = node;
    if (!report.launcher_error.empty()) return;
    if (std::ranges::any_of(fork_failures, [&](auto begin) { return text.starts_with(begin); })) {
      report.no_program = true;
      report.launcher_error = "starting " + entry_of(text, "Application name:") + ": " + entry_of(text, "Error:");
      report.launcher_error.erase(report.launcher_error.find_last_not_of(" .") + 1);
      return;
    }
    if (!report.unreachable.empty() && !report.lost_host) {
      report.lost_host = report.unreachable;
      report.launcher_error = report.unreachable_text;
      return;
    }
    report.launcher_error = first_sentences(text) + (report.lost_host ? ", on " + *report.lost_host : "");
  }
};

}  // namespace

const Launcher& open_mpi = Mpirun();

}  // namespace muster::detail::supervise
