#include "supervise/launcher_output.hpp"

#include "launch/supervised.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace muster::detail::supervise {
namespace {

constexpr std::string_view error_prefix = "muster: error: ";
/// The end of "[1,0]<stderr>:", with which mpirun --tag-output begins each line.
constexpr std::string_view output_tag = "]<stderr>:";
constexpr std::size_t longest_tag = 24;
constexpr std::string_view erase_line = "\033[K";  // clears a progress line before other output

/// The first line of an mpirun message contains one of the first list if it is about the ranks' end, which we report
/// ourselves. If it is about something that mpirun could not do, it reads "NAME was unable to …" (mpirun may have
/// another name), or begins with one of the second list.
constexpr std::array<std::string_view, 6> rank_end_messages{
    "Primary job ",          " noticed that process rank ",      " detected that one ",
    "MPI_ABORT was invoked", " has exited due to process rank ", "An MPI communication peer process has unexpectedly"};
constexpr std::string_view unable_to = " was unable to ";
constexpr std::string_view execve_failure = "Open MPI tried to fork a new process via the \"execve\"";
constexpr std::array<std::string_view, 7> trouble_messages{
    "There are not enough slots",    "ORTE has lost", "ORTE does not know", "A daemon", "An ORTE daemon",
    "All nodes which are allocated", execve_failure};
/// Slurm's lines begin with these.
constexpr std::array<std::string_view, 2> slurm_prefixes{"srun: ", "slurmstepd"};
/// What they say about the end of a step, which we report ourselves.
constexpr std::array<std::string_view, 11> step_end_phrases{": *** STEP ",
                                                            ": *** JOB ",
                                                            "Job step aborted: ",
                                                            "forcing job termination",
                                                            "Terminating StepId=",
                                                            "Force Terminated Step",
                                                            "Complete StepId=",
                                                            "got SIGCONT",
                                                            "Timed out waiting for job step to complete",
                                                            "setting nnodes to ",
                                                            ": Error handler invoked: "};
constexpr std::string_view no_step = "srun: error: Unable to create step for job ";
constexpr std::array<std::string_view, 2> preemption_phrases{" DUE TO PREEMPTION", " DUE TO NODE FAILURE"};
/// ssh's messages about a host that it could not reach; the host's name follows.
constexpr std::array<std::string_view, 2> ssh_failures{"ssh: connect to host ", "ssh: Could not resolve hostname "};
constexpr std::array<std::string_view, 7> ignored_phrases{
    ": Forwarding signal ",     ": abort is already in progress",   " sent help message help-",
    "orte_base_help_aggregate", " total processes failed to start", " total processes killed",
    " ORTE_ERROR_LOG: "};

template <std::size_t n>
bool has_any(std::string_view line, const std::array<std::string_view, n>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](auto part) { return line.find(part) != std::string_view::npos; });
}

template <std::size_t n>
bool begins_with_any(std::string_view line, const std::array<std::string_view, n>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](auto part) { return line.starts_with(part); });
}

bool is_trouble(std::string_view line) {
  const auto name = line.substr(0, line.find(' '));
  return line.substr(name.size()).starts_with(unable_to) || begins_with_any(line, trouble_messages);
}

/// mpirun's rules have 74 dashes.
bool is_rule(std::size_t dashes) { return dashes >= 70 && dashes <= 80; }
bool may_be_dashes(std::string_view begun) {
  return begun.size() <= 80 && begun.find_first_not_of('-') == std::string_view::npos;
}
bool is_dashes(std::string_view line) { return is_rule(line.size()) && may_be_dashes(line); }

/// True if a line that begins like this may turn out to be one that is not shown.
bool may_be_ours(std::string_view begun) {
  if (erase_line.starts_with(begun)) return true;
  if (begun.starts_with(erase_line)) begun.remove_prefix(erase_line.size());
  const auto may_begin = [&](std::string_view whole) { return begun.starts_with(whole) || whole.starts_with(begun); };
  return may_begin(launch::message_prefix) || may_begin(error_prefix) ||
         std::any_of(slurm_prefixes.begin(), slurm_prefixes.end(), may_begin) ||
         std::any_of(ssh_failures.begin(), ssh_failures.end(), may_begin) || may_begin("mpirun: ") ||
         may_begin("mpiexec: ") || may_be_dashes(begun) || begun.front() == '[' ||
         (begun.front() >= '0' && begun.front() <= '9');
}

int signal_named(std::string_view name) {
  for (int signal = 1; signal < 32; ++signal)
    if (name.starts_with(::strsignal(signal))) return signal;
  return 0;
}

/// The first paragraph, without its last sentence if that only introduces a list ("This usually is caused by:").
std::string first_sentences(const std::string& block) {
  auto text = block.substr(0, block.find("\n\n"));
  if (const auto item = text.find("\n* "); item != std::string::npos) text.erase(item);
  std::replace(text.begin(), text.end(), '\n', ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  if (const auto stop = text.rfind(". "); text.ends_with(':') && stop != std::string::npos) text.erase(stop);
  text.erase(text.find_last_not_of(" .:") + 1);
  return text;
}

}  // namespace

std::string LauncherOutput::take(std::string_view bytes) {
  std::string shown;
  for (const char c : bytes) {
    if (showing_ && c != launch::message_prefix.front()) {
      shown += c;
      showing_ = c != '\n' && c != '\r';
      in_block_ = c == '\n' && is_rule(dashes_);
      dashes_ = c == '-' ? dashes_ + 1 : 0;
    } else if (c == '\n') {
      shown += take_line(std::exchange(line_, {}));
    } else if (c == '\r') {
      keep_unreachable(line_);  // ssh ends its lines with \r\n
      shown += std::exchange(line_, {}) + c;
    } else {
      showing_ = false;
      line_ += c;
      if (in_block_ || may_be_ours(line_)) continue;
      dashes_ = c == '-' ? line_.size() : 0;
      shown += std::exchange(line_, {});
      showing_ = true;
    }
  }
  return shown;
}

std::string LauncherOutput::finish() {
  auto rest = std::exchange(opening_, {}) + std::exchange(block_, {}) + std::exchange(line_, {});
  in_block_ = showing_ = false;
  return rest;
}

std::string LauncherOutput::take_line(const std::string& line) {
  if (in_block_) return take_block_line(line);
  if (!is_dashes(line)) return shown_of(line);
  in_block_ = true;
  opening_ = line + "\n";
  return {};
}

std::string LauncherOutput::take_block_line(const std::string& line) {
  const bool first = block_.empty();
  if (first && is_dashes(line)) return {};  // the end of a message whose beginning was lost; it begins another one
  if (first && !has_any(line, rank_end_messages) && !is_trouble(line)) {
    in_block_ = false;
    return std::exchange(opening_, {}) + shown_of(line);
  }
  if (!is_dashes(line)) {
    block_ += line + "\n";
    return {};
  }
  keep_block();
  opening_.clear();
  block_.clear();
  in_block_ = false;
  return {};
}

/// What to show of a finished line.
std::string LauncherOutput::shown_of(const std::string& line) {
  if (!keep(line)) return line + "\n";
  return std::string(line.starts_with(erase_line) ? erase_line : "");
}

/// Reads a finished line; returns true if it was meant for us and is not shown.
bool LauncherOutput::keep(std::string_view line) {
  if (line.starts_with(erase_line)) line.remove_prefix(erase_line.size());
  if (const auto tag = line.find(output_tag); line.starts_with('[') && tag < longest_tag)
    line.remove_prefix(tag + output_tag.size());
  if (line.starts_with(launch::message_prefix)) {
    line.remove_prefix(launch::message_prefix.size());
    const auto space = line.find(' ');
    const auto what = line.substr(0, space);
    const std::string text(space == std::string_view::npos ? "" : line.substr(space + 1));
    report_.loaded = true;
    if (what == launch::message_starting) report_.starting = true;
    if (what == launch::message_up) report_.up = true;
    if (what == message_leaving && !report_.leaving) report_.leaving = std::atoi(text.c_str());
    if (what == message_silent && !report_.silent) report_.silent = text;
    if (what == launch::message_run) report_.run = text;
    if (what == launch::message_min_workers) report_.min_workers = std::atoi(text.c_str());
    if (what == launch::message_ranks_needed) report_.required_ranks = std::atoi(text.c_str());
    if (what == launch::message_stopped) report_.stopped = true;
    if (what == launch::message_cause) report_.has_error_file = true;
    if (what == launch::message_ended) report_.agreed_exit_code = std::atoi(text.c_str());
    return true;
  }
  if (line.starts_with(error_prefix)) {
    if (report_.error.empty()) report_.error = line.substr(error_prefix.size());
    return true;
  }
  if (has_any(line, ignored_phrases)) return true;
  keep_unreachable(line);
  if (!begins_with_any(line, slurm_prefixes)) return false;
  if (has_any(line, preemption_phrases)) report_.preempted = true;
  std::array<char, 256> host{};
  int rank = 0, end = 0;
  const std::string text(line);
  // srun reports several tasks in one line: "tasks 0,2-3: Killed".
  if (std::sscanf(text.c_str(), "srun: error: %255[^:]: task%*[s ]%d%n", host.data(), &rank, &end) == 2) {
    const auto fact = text.find(": ", static_cast<std::size_t>(end));
    if (fact == std::string::npos) return true;
    const int signal = signal_named(std::string_view(text).substr(fact + 2));
    // The first failure counts, except that srun sends SIGTERM to all others when one task has failed.
    const bool replaces = report_.lost_rank && report_.lost_rank->signal == SIGTERM && signal != SIGTERM;
    if (report_.failed_rank && !replaces) return true;
    report_.failed_rank = rank;
    report_.lost_rank.reset();
    if (signal != 0) report_.lost_rank = {rank, host.data(), signal};
    int code = 0;
    report_.exit_code.reset();
    if (std::sscanf(text.c_str() + fact, ": Exited with exit code %d", &code) == 1) report_.exit_code = code;
  } else if (std::sscanf(text.c_str(), "srun: error: Node failure on %255s", host.data()) == 1) {
    report_.lost_host = host.data();
    if (report_.launcher_error.empty()) report_.launcher_error = "Slurm has lost the node " + *report_.lost_host;
  } else if (std::sscanf(text.c_str(), "srun: error: Task launch for %*s failed on node %255[^:]", host.data()) == 1) {
    // Slurm has not yet noticed that the node is lost. It then kills the ranks of the other nodes.
    report_.lost_host = host.data();
    if (report_.launcher_error.empty())
      report_.launcher_error = "Slurm cannot start a rank on the node " + *report_.lost_host;
  } else if (text.starts_with(no_step)) {
    if (report_.launcher_error.empty())
      report_.launcher_error = "Slurm cannot start the ranks" + text.substr(text.find(": ", no_step.size()));
  } else if (!has_any(line, step_end_phrases)) {
    report_.slurm = text;
    return !shown_of_slurm_.insert(text).second;
  }
  return true;
}

/// Notes a host that ssh could not reach. The line is shown too, since a program may use ssh for its own purposes.
void LauncherOutput::keep_unreachable(std::string_view line) {
  for (const auto begin : ssh_failures) {
    if (!line.starts_with(begin)) continue;
    const auto host = line.substr(begin.size(), line.find_first_of(" :", begin.size()) - begin.size());
    unreachable_ = {std::string(host), std::string(line.substr(0, line.find_last_not_of(" .\r") + 1))};
  }
}

void LauncherOutput::keep_block() {
  std::array<char, 256> host{};
  int rank = 0, pid = 0, signal = 0;
  if (std::sscanf(block_.c_str(), "%*s noticed that process rank %d with PID %d on node %255s exited on signal %d",
                  &rank, &pid, host.data(), &signal) == 4) {
    if (!report_.lost_rank) report_.lost_rank = {rank, host.data(), signal};
    return;
  }
  if (const auto name = block_.find("Process name: [["); name != std::string::npos && !report_.failed_rank) {
    int family = 0, job = 0;
    if (std::sscanf(block_.c_str() + name, "Process name: [[%d,%d],%d]", &family, &job, &rank) == 3)
      report_.failed_rank = rank;
  }
  if (!is_trouble(block_.substr(0, block_.find('\n')))) return;
  if (const auto remote = block_.find("Remote daemon"); remote != std::string::npos)
    if (const auto node = block_.find(" on node ", remote); node != std::string::npos)
      report_.lost_host = block_.substr(node + 9, block_.find('\n', node) - node - 9);
  if (!report_.launcher_error.empty()) return;
  if (block_.starts_with(execve_failure)) {
    const auto value_of = [&](std::string_view name) {
      const auto at = block_.find(name);
      if (at == std::string::npos) return std::string();
      const auto begin = block_.find_first_not_of(' ', at + name.size());
      return block_.substr(begin, block_.find('\n', begin) - begin);
    };
    report_.no_program = true;
    report_.launcher_error = "starting " + value_of("Application name:") + ": " + value_of("Error:");
    report_.launcher_error.erase(report_.launcher_error.find_last_not_of(" .") + 1);
    return;
  }
  if (unreachable_ && !report_.lost_host) {
    report_.lost_host = unreachable_->host;
    report_.launcher_error = unreachable_->said;
    return;
  }
  report_.launcher_error = first_sentences(block_) + (report_.lost_host ? ", on " + *report_.lost_host : "");
}

}  // namespace muster::detail::supervise
