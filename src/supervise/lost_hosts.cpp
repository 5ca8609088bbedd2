#include "supervise/lost_hosts.hpp"

#include "base/program.hpp"
#include "supervise/launch_command.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <thread>

namespace muster::detail::supervise {
namespace {

using namespace std::chrono_literals;

/// The time between two questions to a host, and before the first. A host that is lost again is first asked later.
constexpr auto question_interval = 10s;
constexpr auto longest_interval = 600s;  ///< the longest time before the first question
/// A host that goes down may end a login before it has answered, while it can still be reached: it is asked again.
constexpr int most_broken_logins = 5;
constexpr auto broken_login_interval = 500ms;
/// A host answers with this word and its name. If a login program starts echo without a shell, the command for the name
/// follows instead.
constexpr std::string_view answer = "here", name_command = "`uname -n`";

/// Returns the name in an answer, empty if the answer has none. Returns nothing if no line is an answer; other lines
/// may be a greeting.
std::optional<std::string> answered_name(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(std::string(answer) + " " + std::string(name_command))) return "";
    std::istringstream words(line);
    std::string first, name, more;
    if (words >> first && first == answer && !(words >> name >> more)) return name;
  }
  return {};
}

bool has_answered(const std::string& text) { return answered_name(text).has_value(); }

/// Returns the line in which ssh reports that it cannot reach the host, without its full stop; empty if there is none.
std::string ssh_failure_in(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (std::ranges::any_of(ssh_failures, [&](auto begin) { return line.starts_with(begin); }))
      return line.substr(0, line.find_last_not_of(" .\r") + 1);
  return {};
}

}  // namespace

std::vector<std::string> login_program(const Environment& environment) {
  for (const auto* const name : login_variables) {
    std::vector<std::string> words;
    std::istringstream text(value_of(name, environment));
    for (std::string word; text >> word;) words.push_back(word);
    if (!words.empty()) return words;
  }
  return {"ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"};
}

void LostHosts::add(const std::string& host) {
  if (!hosts_.insert(host).second) return;
  const int before = times_lost_[host]++;
  next_question_[host] =
      Clock::now() + std::min<std::chrono::seconds>(question_interval * (1 << std::min(before, 10)), longest_interval);
}

void LostHosts::remove(const Hosts& hosts) {
  for (const auto& host : hosts) hosts_.erase(host);
}

Hosts LostHosts::answering() {
  if (login_.empty()) return {};
  const auto now = Clock::now();
  for (const auto& host : hosts_)
    if (auto& next = next_question_[host]; now >= next) {
      ask(host);
      next = now + question_interval;
    }
  Hosts answering;
  for (const auto& one : read_answers())
    if (has_answered(one.text) && hosts_.contains(one.host)) answering.insert(one.host);
  return answering;
}

std::map<std::string, std::string> LostHosts::ask_all(const Hosts& others, std::chrono::seconds timeout) {
  std::map<std::string, std::string> unreached;
  if (login_.empty()) return unreached;
  for (const auto& host : hosts_) ask(host);
  for (const auto& host : others) ask(host);
  const auto until = Clock::now() + timeout;
  for (int logins = 1;; ++logins) {
    Hosts broken;
    while (!asked_.empty() && Clock::now() < until) {
      for (const auto& one : read_answers()) {
        const auto failure = ssh_failure_in(one.text);
        if (const auto name = answered_name(one.text)) {
          hosts_.erase(one.host);
          if (!name->empty()) hosts_by_name_[short_name(*name)] = one.host;
        } else if (others.contains(one.host)) {
          if (failure.empty())
            broken.insert(one.host);
          else
            unreached[one.host] = failure;
        }
      }
      std::this_thread::sleep_for(10ms);
    }
    if (broken.empty() || logins == most_broken_logins || Clock::now() + broken_login_interval >= until) break;
    std::this_thread::sleep_for(broken_login_interval);
    for (const auto& host : broken) ask(host);
  }
  for (const auto& one : asked_)
    if (others.contains(one.host)) unreached[one.host] = "";
  stop_asking();
  return unreached;
}

std::string LostHosts::host_called(const std::string& name) const {
  const auto found = hosts_by_name_.find(name);
  return found == hosts_by_name_.end() ? "" : found->second;
}

void LostHosts::ask(const std::string& host) {
  if (std::ranges::find(asked_, host, &Asked::host) != asked_.end()) return;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  auto words = login_;
  words.insert(words.end(), {host, "echo", std::string(answer), std::string(name_command)});
  const pid_t process = start_program(std::move(words), ends[1], /*errors=*/true);
  ::close(ends[1]);
  if (process >= 0)
    asked_.push_back({host, ends[0], process});  // Job::ended() collects the process when it has ended
  else
    ::close(ends[0]);
}

/// Reads the answers that have come. Returns the questions that were answered or whose login program has ended, and
/// forgets them.
std::vector<LostHosts::Asked> LostHosts::read_answers() {
  std::vector<Asked> ended;
  std::erase_if(asked_, [&](Asked& one) {
    std::array<char, 1024> text{};
    ssize_t count = 0;
    while ((count = ::read(one.answer, text.data(), text.size())) > 0)
      one.text.append(text.data(), static_cast<std::size_t>(count));
    // A master connection of ssh may keep the pipe open even after the answer.
    if (count < 0 && !has_answered(one.text)) return false;
    ::close(one.answer);
    ended.push_back(std::move(one));
    return true;
  });
  return ended;
}

void LostHosts::stop_asking() {
  read_answers();  // forgets the processes that have ended: their numbers may belong to other processes now
  for (const auto& one : asked_) {
    ::kill(-one.process, SIGKILL);
    ::close(one.answer);
  }
  asked_.clear();
}

}  // namespace muster::detail::supervise
