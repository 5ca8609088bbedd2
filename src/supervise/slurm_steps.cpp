#include "supervise/slurm_steps.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

namespace muster::detail::supervise {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// How long one of Slurm's programs may take: they wait for minutes for a controller that does not answer.
constexpr auto tool_limit = 3s;
/// How long a step may take to end.
constexpr auto end_limit = 2s;

/// Reads until the end of the file; none if that does not come in time.
std::optional<std::string> read_all(int file, Clock::time_point until) {
  std::string text;
  std::array<char, 4096> buffer{};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd source{file, POLLIN, 0};
    if (left <= 0) return {};
    if (::poll(&source, 1, static_cast<int>(left)) <= 0) continue;
    const auto count = ::read(file, buffer.data(), buffer.size());
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

/// Runs a program; returns its output, or none if it failed or was killed because it took too long.
std::optional<std::string> output_of(std::vector<std::string> words) {
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t process = 0;
  const bool started = ::posix_spawnp(&process, pointers[0], &files, nullptr, pointers.data(), environ) == 0;
  ::posix_spawn_file_actions_destroy(&files);
  ::close(ends[1]);
  std::optional<std::string> text;
  if (started) {
    text = read_all(ends[0], Clock::now() + tool_limit);
    if (!text) ::kill(process, SIGKILL);
    int status = 0;
    if (::waitpid(process, &status, 0) != process || status != 0) text.reset();
  }
  ::close(ends[0]);
  return text;
}

/// The ids of their steps ("12.0"); none if Slurm does not answer. A line of scontrol describes a step:
/// "StepId=12.0 … SrunHost:Pid=n1:4711".
std::optional<std::vector<std::string>> steps_of(const std::set<pid_t>& sruns, const std::string& host) {
  const char* const job = std::getenv("SLURM_JOB_ID");
  if (job == nullptr) return {};
  const auto text = output_of({"scontrol", "--oneliner", "show", "step", job});
  if (!text) return {};
  constexpr std::string_view id_key = "StepId=", srun_key = "SrunHost:Pid=";
  std::vector<std::string> steps;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    std::string id, srun;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (word.starts_with(id_key)) id = word.substr(id_key.size());
      if (word.starts_with(srun_key)) srun = word.substr(srun_key.size());
    }
    const bool started = !id.empty() && id.back() >= '0' && id.back() <= '9';  // "12.TBD" waits for CPUs
    const auto is_this = [&](pid_t pid) { return srun == host + ":" + std::to_string(pid); };
    if (started && std::ranges::any_of(sruns, is_this)) steps.push_back(id);
  }
  return steps;
}

bool kill_all(std::vector<std::string> steps) {
  steps.insert(steps.begin(), {"scancel", "--quiet", "--signal=KILL"});
  return output_of(std::move(steps)).has_value();
}

}  // namespace

bool end_steps(const std::set<pid_t>& sruns, const std::string& host) {
  for (const auto until = Clock::now() + end_limit;;) {
    auto steps = steps_of(sruns, host.substr(0, host.find('.')));
    if (steps && steps->empty()) return true;
    if (!steps || !kill_all(std::move(*steps)) || Clock::now() >= until) return false;
    std::this_thread::sleep_for(100ms);
  }
}

}  // namespace muster::detail::supervise
