#include "base/program.hpp"

#include "base/host.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <map>
#include <sstream>
#include <thread>

namespace muster::detail {
namespace {

using Clock = std::chrono::steady_clock;

/// True if the process has ended before `until`; then `status` says how.
bool wait_for(pid_t process, int& status, Clock::time_point until) {
  for (;;) {
    const auto ended = ::waitpid(process, &status, WNOHANG);
    if (ended != 0 && !(ended < 0 && errno == EINTR)) return ended == process;
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Appends everything until the end of the file to `text`; false if the end does not come before `until`. A read error
/// counts as the end.
bool read_all(int file, std::string& text, Clock::time_point until) {
  std::array<char, 4096> buffer{};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd source{file, POLLIN, 0};
    if (left <= 0) return false;
    const int ready = ::poll(&source, 1, static_cast<int>(left));
    if (ready == 0) continue;
    const auto count = ready < 0 ? -1 : ::read(file, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return true;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

}  // namespace

std::filesystem::path find_program(const std::string& name, const char* path) {
  const auto is_program = [](const std::filesystem::path& file) {
    std::error_code unknown;
    return std::filesystem::is_regular_file(file, unknown) && ::access(file.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos)
    return is_program(name) ? std::filesystem::path(name) : std::filesystem::path();
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const auto file = std::filesystem::path(folder) / name; !folder.empty() && is_program(file)) return file;
  return {};
}

std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& more) {
  std::map<std::string, std::string> variables;
  for (const auto& name : variable_names()) variables[name] = value_of(name);
  for (const auto& [name, value] : more) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (auto& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

pid_t start_program(std::vector<std::string> words, int output, bool errors) {
  const auto pointers = pointers_to(words);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
  if (errors)
    ::posix_spawn_file_actions_adddup2(&files, output, STDERR_FILENO);
  else
    ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  pid_t process = -1;
  const bool started = ::posix_spawnp(&process, pointers[0], &files, &attributes, pointers.data(), environ) == 0;
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  return started ? process : -1;
}

ProgramEnd run_program(std::vector<std::string> words, std::chrono::milliseconds timeout, bool errors) {
  ProgramEnd end;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return end;
  const pid_t process = start_program(std::move(words), ends[1], errors);
  ::close(ends[1]);
  if (process >= 0) {
    const auto until = Clock::now() + timeout;
    int status = 0;
    if (read_all(ends[0], end.output, until) && wait_for(process, status, until)) {
      end.kind = WIFEXITED(status) ? ProgramEnd::Kind::exited : ProgramEnd::Kind::killed_by_signal;
      end.code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
    } else {
      end.kind = ProgramEnd::Kind::out_of_time;
      ::kill(-process, SIGKILL);
      while (::waitpid(process, &status, 0) < 0 && errno == EINTR) continue;
    }
  }
  ::close(ends[0]);
  return end;
}

std::optional<std::string> output_of(std::vector<std::string> words, std::chrono::milliseconds timeout) {
  auto end = run_program(std::move(words), timeout);
  return end.succeeded() ? std::optional(std::move(end.output)) : std::nullopt;
}

}  // namespace muster::detail
