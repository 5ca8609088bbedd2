#include "supervise/launcher_output.hpp"

#include "launch/supervised.hpp"
#include "supervise/launchers/launchers.hpp"
#include "supervise/lost_hosts.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace muster::detail::supervise {
namespace {

constexpr std::string_view error_prefix = "muster: error: ";
/// mpirun --tag-output begins each line with a tag like "[1,0]<stderr>:"; this is the end of the tag.
constexpr std::string_view output_tag = "]<stderr>:";
constexpr std::size_t longest_tag = 24;
constexpr std::string_view erase_line = "\033[K";  // a progress line is cleared by this before other output

/// True for the length of a rule, a line of equal characters: Open MPI's have 74 dashes, Hydra's 83 equals signs.
bool is_rule(std::size_t length) { return length >= 70 && length <= 90; }
bool may_be_rule(std::string_view begun) {
  return begun.size() <= 90 && (begun.front() == '-' || begun.front() == '=') &&
         begun.find_first_not_of(begun.front()) == std::string_view::npos;
}
bool is_rule(std::string_view line) { return is_rule(line.size()) && may_be_rule(line); }

/// True if a line with this beginning may turn out to be one that is not shown.
bool may_be_ours(std::string_view begun) {
  if (erase_line.starts_with(begun)) return true;
  if (begun.starts_with(erase_line)) begun.remove_prefix(erase_line.size());
  const auto may_begin = [&](std::string_view beginning) { return may_become(begun, beginning); };
  return may_begin(launch::message_prefix) || may_begin(error_prefix) ||
         std::any_of(ssh_failures.begin(), ssh_failures.end(), may_begin) || may_be_rule(begun) ||
         std::ranges::any_of(launchers(), [&](const auto* launcher) { return launcher->may_begin(begun); });
}

/// Returns the launcher whose messages begin with this line; null if no launcher's do.
const Launcher* launcher_with_message(std::string_view first_line) {
  for (const auto* launcher : launchers())
    if (launcher->is_message(first_line)) return launcher;
  return nullptr;
}

}  // namespace

std::string LauncherOutput::take(std::string_view bytes) {
  std::string shown;
  for (const char c : bytes) {
    // PRTE also writes the zero byte at the end of its text.
    if (std::exchange(after_message_, false) && c == '\0') continue;
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
  if (!is_rule(line)) return shown_of(line);
  in_block_ = true;
  opening_ = line + "\n";
  return {};
}

std::string LauncherOutput::take_block_line(const std::string& line) {
  const bool first = block_.empty();
  // The end of a message whose beginning was lost, or the beginning of another message.
  if (first && is_rule(line)) return {};
  if (first && launcher_with_message(line) == nullptr) {
    in_block_ = false;
    return std::exchange(opening_, {}) + shown_of(line);
  }
  if (!is_rule(line)) {
    block_ += line + "\n";
    return {};
  }
  launcher_with_message(block_.substr(0, block_.find('\n')))->read_message(block_, report_);
  opening_.clear();
  block_.clear();
  in_block_ = false;
  after_message_ = true;
  return {};
}

/// Returns what to show of a complete line.
std::string LauncherOutput::shown_of(const std::string& line) {
  if (!keep(line)) return line + "\n";
  return std::string(line.starts_with(erase_line) ? erase_line : "");
}

/// Reads a complete line. Returns true if the line was meant for this process, so that it is not shown.
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
    if (what == message_starting) report_.starting = true;
    if (what == launch::message_up) report_.up = true;
    if (what == launch::message_process) keep_process(text);
    if (what == message_leaving && !report_.leaving) report_.leaving = std::atoi(text.c_str());
    if (what == message_exit) keep_exit(text);
    if (what == message_silent && !report_.silent) report_.silent = text;
    if (what == launch::message_run) report_.run = text;
    if (what == launch::message_min_workers) report_.min_workers = std::atoi(text.c_str());
    if (what == launch::message_ranks_needed) report_.required_ranks = std::atoi(text.c_str());
    if (what == launch::message_stopped) report_.stopped = true;
    if (what == launch::message_cause) report_.has_error_file = true;
    if (what == launch::message_returned) report_.returned_code = std::atoi(text.c_str());
    if (what == launch::message_ended) report_.ended = true;
    return true;
  }
  if (line.starts_with(error_prefix)) {
    if (report_.error.empty()) report_.error = line.substr(error_prefix.size());
    return true;
  }
  keep_unreachable(line);
  return std::ranges::any_of(launchers(), [&](const auto* launcher) { return launcher->read_line(line, report_); });
}

void LauncherOutput::keep_process(const std::string& text) {
  std::array<char, 256> host{};
  RankProcess process;
  if (std::sscanf(text.c_str(), "%d %d %255s", &process.rank, &process.pid, host.data()) != 3) return;
  process.host = host.data();
  report_.processes.push_back(std::move(process));
}

void LauncherOutput::keep_exit(const std::string& text) {
  std::array<char, 256> host{};
  int rank = 0, code = 0;
  if (report_.failed_rank || report_.leaving) return;
  if (std::sscanf(text.c_str(), "%d %d %255s", &rank, &code, host.data()) < 2) return;
  if (report_.returned_code == code) return;  // then all ranks exit with this code, and it is no failure
  report_.failed_rank = rank;
  report_.failed_host = host.data();
  report_.told_code = code;
}

/// Records a host that ssh could not reach. The line is still shown, since the program may use ssh for its own
/// purposes.
void LauncherOutput::keep_unreachable(std::string_view line) {
  for (const auto begin : ssh_failures) {
    if (!line.starts_with(begin)) continue;
    const auto host = line.substr(begin.size(), line.find_first_of(" :", begin.size()) - begin.size());
    report_.unreachable = host;
    report_.unreachable_text = line.substr(0, line.find_last_not_of(" .\r") + 1);
  }
}

}  // namespace muster::detail::supervise
