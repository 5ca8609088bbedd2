#include "supervise/lost_hosts.hpp"

#include "base/program.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <thread>

namespace muster::detail::supervise {
namespace {

using namespace std::chrono_literals;

/// Between two questions to a host that was lost once.
constexpr auto question_interval = 10s;
constexpr auto longest_interval = 600s;
/// How long a host may take to answer before a start.
constexpr auto answer_limit = 5s;

}  // namespace

std::vector<std::string> login_program(const Environment& environment) {
  for (const auto* name : {"OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"}) {
    const char* const value = environment(name);
    if (value == nullptr) continue;
    std::vector<std::string> words;
    std::istringstream text(value);
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
  return read_answers();
}

void LostHosts::remove_answering() {
  if (login_.empty() || hosts_.empty()) return;
  for (const auto& host : hosts_) ask(host);
  for (const auto until = Clock::now() + answer_limit; !asked_.empty() && Clock::now() < until;) {
    remove(read_answers());
    std::this_thread::sleep_for(10ms);
  }
  stop_asking();
}

void LostHosts::ask(const std::string& host) {
  if (std::ranges::find(asked_, host, &Asked::host) != asked_.end()) return;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  auto words = login_;
  words.insert(words.end(), {host, "echo", "here"});
  const pid_t process = start_program(std::move(words), ends[1]);
  ::close(ends[1]);
  if (process >= 0)
    asked_.push_back({host, ends[0], process});  // the job's object collects the process when it has ended
  else
    ::close(ends[0]);
}

Hosts LostHosts::read_answers() {
  Hosts answered;
  std::erase_if(asked_, [&](const Asked& one) {
    std::array<char, 64> text{};
    const auto count = ::read(one.answer, text.data(), text.size());
    if (count < 0) return false;  // no answer yet
    if (count > 0 && hosts_.contains(one.host)) answered.insert(one.host);
    ::close(one.answer);
    return true;
  });
  return answered;
}

void LostHosts::stop_asking() {
  read_answers();  // forgets the processes that have ended, whose numbers others may have by now
  for (const auto& one : asked_) {
    ::kill(-one.process, SIGKILL);
    ::close(one.answer);
  }
  asked_.clear();
}

}  // namespace muster::detail::supervise
