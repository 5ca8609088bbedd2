// srun, which starts the ranks of a Slurm job through Slurm's daemons.
#include "base/text.hpp"
#include "launch/launcher.hpp"
#include "supervise/launcher_output.hpp"
#include "supervise/launchers/launchers.hpp"
#include "supervise/slurm.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace muster::detail::supervise {
namespace {

/// Lines from Slurm begin with one of these.
constexpr std::array<std::string_view, 2> prefixes{"srun: ", "slurmstepd"};
/// Lines from Slurm about the end of a step contain one of these. They are not shown, since the supervisor reports the
/// end.
constexpr std::array<std::string_view, 11> step_end_phrases{"Job step aborted: ",
                                                            "forcing job termination",
                                                            "Terminating StepId=",
                                                            "Force Terminated Step",
                                                            "Complete StepId=",
                                                            "got SIGCONT",
                                                            "Timed out waiting for job step to complete",
                                                            "setting nnodes to ",
                                                            " aborted before step completely launched",
                                                            "Application launch failed: ",
                                                            ": Error handler invoked: "};
constexpr std::string_view unable = "srun: error: Unable to ", no_controller = "Unable to contact slurm controller";
constexpr std::string_view no_step = "srun: error: Unable to create step for job ";
constexpr std::array<std::string_view, 2> preemption_phrases{" DUE TO PREEMPTION", " DUE TO NODE FAILURE"};
constexpr std::array<std::string_view, 2> cancel_phrases{": *** STEP ", ": *** JOB "};

/// Reads "srun: error: n1: task 1: Killed", or "srun: error: n1: tasks 0,2-3: Killed". Returns false for other lines.
bool read_task(const std::string& text, LauncherReport& report) {
  std::array<char, 256> host{};
  int rank = 0, end = 0;
  if (std::sscanf(text.c_str(), "srun: error: %255[^:]: task%*[s ]%d%n", host.data(), &rank, &end) != 2) return false;
  const auto fact = text.find(": ", static_cast<std::size_t>(end));
  if (fact == std::string::npos) return true;
  const int signal = signal_named(std::string_view(text).substr(fact + 2));
  // Keep the first failure. But srun sends SIGTERM to all other tasks when one task has failed, so replace SIGTERM.
  const bool replaces = report.lost_rank && report.lost_rank->signal == SIGTERM && signal != SIGTERM;
  if (report.failed_rank && !replaces) return true;
  report.failed_rank = rank;
  report.failed_host = host.data();
  report.lost_rank.reset();
  // After MPI_Abort or a lost node, Slurm kills the other tasks; these are not lost ranks.
  const bool follows = !report.launcher_error.empty() || (report.leaving && signal == SIGKILL);
  if (signal != 0 && !follows) report.lost_rank = {rank, host.data(), signal};
  int code = 0;
  report.exit_code.reset();
  if (std::sscanf(text.c_str() + fact, ": Exited with exit code %d", &code) == 1) report.exit_code = code;
  return true;
}

/// The ranks that one component of a heterogeneous job has; in other jobs all ranks.
struct Part {
  int ranks = 1;
  int nodes = 0;  ///< number of nodes of the component to use; 0 for all
  Hosts lost = {};
  int group = -1;  ///< number of the component; -1 in other jobs
};

/// Returns how many of the Slurm job's nodes the ranks need, without the lost nodes.
int nodes_for(const Start& start) {
  const auto& options = start.options;
  const int all = nodes_of_job(start.environment), left = all - static_cast<int>(start.lost.size());
  // If the job has no number of tasks, the requested ranks are spread over all its nodes.
  const auto given = in_components(start.environment, "SLURM_NTASKS");
  const bool has_tasks = std::ranges::any_of(given, [](const auto& text) { return !text.empty(); });
  const int tasks = options.ranks && !has_tasks ? *options.ranks + options.spares : all_tasks_of_job(start.environment);
  const int on_each = std::max(1, tasks / std::max(1, all));
  return std::min(left, (start.ranks + on_each - 1) / on_each);
}

/// True if a name matches a pattern "n[1-3,08]". Numbers are compared with their leading zeros.
bool matches(const std::string& name, const std::string& pattern) {
  const auto open = std::min(pattern.find('['), pattern.size()), close = pattern.find(']');
  if (!name.starts_with(pattern.substr(0, open))) return false;
  if (close == std::string::npos) return name == pattern;
  const auto by_size = [](const std::string& number) { return std::pair(number.size(), number); };
  const auto end = std::min(name.find_first_not_of("0123456789", open), name.size());
  const auto number = by_size(name.substr(open, end - open));
  std::istringstream ranges(pattern.substr(open + 1, close - open - 1));
  for (std::string range; std::getline(ranges, range, ',');)
    if (by_size(range.substr(0, range.find('-'))) <= number && number <= by_size(range.substr(range.find('-') + 1)))
      return matches(name.substr(end), pattern.substr(close + 1));
  return false;
}

/// True if a list of nodes in Slurm's form, "n[1-3,08],m5", contains the node.
bool has_node(const std::string& list, const std::string& node) {
  std::string pattern;
  bool in_brackets = false;
  for (const char c : list + ",") {
    if (c == '[' || c == ']') in_brackets = c == '[';
    if (c != ',' || in_brackets)
      pattern += c;
    else if (matches(node, std::exchange(pattern, {})))
      return true;
  }
  return false;
}

/// Returns one part for each component of a heterogeneous job that gets ranks; in other jobs one part.
std::vector<Part> in_parts(const Start& start) {
  const bool needs_nodes = !start.lost.empty() || start.options.spares > 0;
  const Part whole{.ranks = start.ranks, .nodes = needs_nodes ? nodes_for(start) : 0, .lost = start.lost};
  const auto tasks = tasks_of_job(start.environment);
  if (tasks.size() < 2) return {whole};
  const auto nodes = in_components(start.environment, "SLURM_JOB_NUM_NODES");
  const auto names = in_components(start.environment, "SLURM_JOB_NODELIST");
  std::vector<Part> parts;
  int left = start.ranks;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    Part part{.lost = start.lost, .group = static_cast<int>(i)};
    // srun refuses to exclude nodes of another component.
    std::erase_if(part.lost, [&](const auto& node) { return !has_node(names[i], node); });
    const int all = std::max(1, std::atoi(nodes[i].c_str())), lost = static_cast<int>(part.lost.size());
    part.ranks = std::min(left, tasks[i] * (all - lost) / all);
    part.nodes = lost == 0 ? 0 : std::min(all - lost, part.ranks);
    left -= part.ranks;
    if (part.ranks > 0) parts.push_back(std::move(part));
  }
  if (parts.empty()) return {whole};
  parts.back().ranks += left;  // more ranks are requested than there are tasks
  return parts;
}

class Srun : public Launcher {
 public:
  Srun() {
    batch_system = "Slurm";
    program = "srun";
    leaves_ranks = true;
  }

  bool fits(const SuperviseOptions& options, const Environment& environment, const std::string& mpi) const override {
    // Cray MPICH has no mpiexec of its own, so srun is used even on one node.
    return options.hosts.empty() && environment("SLURM_JOB_ID") != nullptr &&
           (nodes_of_job(environment) > 1 || mpi.find("CRAY") != std::string::npos);
  }

  std::vector<std::string> words(const Start& start) const override {
    std::vector<std::string> words;
    for (const auto& part : in_parts(start)) {
      if (!words.empty()) {  // separates this part from the one before
        words.insert(words.end(), start.options.command.begin(), start.options.command.end());
        words.push_back(":");
      }
      // When a rank has failed, the supervisor makes srun kill the others at once, by end(). With --kill-on-bad-exit=1,
      // Slurm would send SIGTERM, the request to save, and only after KillWait (30 s by default) SIGKILL.
      words.insert(words.end(), {"--mpi=" + launch::srun_plugin(start.mpi), "--kill-on-bad-exit=0"});
      if (!part.lost.empty()) words.push_back("--exclude=" + joined({part.lost.begin(), part.lost.end()}));
      if (part.group >= 0) words.push_back(str("--het-group=", part.group));
      // Without --nodes, srun uses as many nodes as the job has.
      if (part.nodes > 0) words.push_back(str("--nodes=", part.nodes));
      words.insert(words.end(), {"-n", std::to_string(part.ranks)});
    }
    return words;
  }

  Variables settings(const Start& start) const override {
    // srun does not take the CPUs per task from the job by itself. It refuses a start if they leave no room for the
    // ranks.
    const char* const cpus = start.environment("SLURM_CPUS_PER_TASK");
    const auto tasks = tasks_of_job(start.environment);
    if (cpus == nullptr || tasks.size() > 1 || start.ranks > tasks.front()) return {};
    return {{"SRUN_CPUS_PER_TASK", cpus}};
  }

  bool may_begin(std::string_view begun) const override {
    return std::ranges::any_of(prefixes, [&](auto prefix) { return may_become(begun, prefix); });
  }

  /// Also returns true for the second of two equal lines, since Slurm repeats some of its lines.
  bool read_line(std::string_view line, LauncherReport& report) const override {
    if (std::ranges::none_of(prefixes, [&](auto prefix) { return line.starts_with(prefix); })) return false;
    if (contains_any(line, preemption_phrases)) report.preempted = true;
    if (contains_any(line, cancel_phrases)) report.step_cancelled = true;
    const std::string text(line);
    std::array<char, 256> host{};
    int rank = 0, end = 0;
    if (read_task(text, report)) return true;
    if (std::sscanf(text.c_str(), "srun: error: Node failure on %255s", host.data()) == 1) {
      report.lose_host(host.data(), "Slurm has lost the node ");
    } else if (std::sscanf(text.c_str(), "srun: error: Task launch for %*s failed on node %255[^:]", host.data()) ==
               1) {
      // Slurm has not noticed yet that the node is lost. It now kills the ranks on the other nodes.
      report.lose_host(host.data(), "Slurm cannot start a rank on the node ");
    } else if (std::sscanf(text.c_str(), "srun: error: task %d launch failed: %n", &rank, &end) == 1 && end > 0) {
      // Slurm now kills the other ranks. Another start with as many ranks may succeed.
      report.failed_rank = rank;
      report.lost_rank.reset();
      report.keep_error(str("Slurm cannot start rank ", rank, ": ", text.substr(static_cast<std::size_t>(end))));
    } else if (text.starts_with(unable) && text.find(no_controller) != std::string::npos) {
      report.slurm_away = true;
      report.launcher_error = "Slurm's controller does not answer";
    } else if (report.slurm_away && text.starts_with("srun: Check SLURM_JOB_ID environment variable")) {
      // In this case Slurm believes that the job has ended.
    } else if (text.starts_with(no_step)) {
      report.keep_error("Slurm cannot start the ranks" + text.substr(text.find(": ", no_step.size())));
    } else if (!contains_any(line, cancel_phrases) && !contains_any(line, step_end_phrases)) {
      report.slurm = text;
      return !report.shown_of_slurm.insert(text).second;
    }
    return true;
  }

  Variables end_earlier(const std::set<pid_t>& processes, const std::string& host) const override {
    // Until Slurm notices that a node is lost, it keeps the old step there, and srun would wait for the step's CPUs.
    if (processes.empty() || end_steps(processes, host)) return {};
    return {{"SLURM_OVERLAP", "1"}};
  }

  Hosts nodes_out_of_service() const override { return supervise::nodes_out_of_service(); }
};

}  // namespace

const Launcher& srun = Srun();

}  // namespace muster::detail::supervise
