#include "process.hpp"

#include "../interrupt.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <muster/error.hpp>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

namespace muster::bench {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

[[noreturn]] void fail(const std::string& program, const std::string& doing, int error) {
  throw Error(ExitCode::retry, "starting " + program, doing + ": " + std::strerror(error));
}

/// Both ends of a pipe, closed on exec.
struct Pipe {
  explicit Pipe(const std::string& program) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail(program, "making a pipe", errno);
    read = ends[0];
    write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    ::close(read);
    close_write();
  }
  void close_write() {
    if (write >= 0) ::close(write);
    write = -1;
  }
  int read = -1;
  int write = -1;
};

/// A process and its process group; the destructor ends both.
class Child {
 public:
  Child(const Command& command, int out, int err);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    ::kill(-pid_, running_ ? SIGTERM : SIGKILL);
    // A launcher that is asked to stop ends its ranks too.
    for (int i = 0; i < 100 && !ended(); ++i) std::this_thread::sleep_for(50ms);
    ::kill(-pid_, SIGKILL);
    if (running_) ::waitpid(pid_, nullptr, 0);
  }

  bool ended() {
    int status = 0;
    if (running_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      running_ = false;
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return !running_;
  }
  int code() const { return code_; }

 private:
  pid_t pid_ = -1;
  bool running_ = true;
  int code_ = 0;
};

std::vector<std::string> with_own_environment(const Command& command) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : command.environment) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

Child::Child(const Command& command, int out, int err) {
  auto words = command.words;
  auto variables = with_own_environment(command);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  if (command.quiet) ::posix_spawn_file_actions_adddup2(&files, err, STDERR_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  const int error =
      ::posix_spawnp(&pid_, words[0].c_str(), &files, &attributes, pointers(words).data(), pointers(variables).data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) fail(command.words[0], "it does not start", error);
}

/// Appends the available data; returns false at the end of the file.
bool drain(int descriptor, std::string& text) {
  std::array<char, 65536> buffer{};
  const auto count = ::read(descriptor, buffer.data(), buffer.size());
  if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && (errno == EINTR || errno == EAGAIN));
}

std::string last_line(const std::string& text) {
  std::istringstream stream(text);
  std::string last;
  for (std::string line; std::getline(stream, line);)
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
  return last;
}

}  // namespace

Finished run(const Command& command) {
  const tool::InterruptGuard interrupt;
  Finished finished;
  Pipe out(command.words[0]), err(command.words[0]);
  finished.begin = Clock::now();
  Child child(command, out.write, err.write);
  out.close_write();
  err.close_write();

  std::array<pollfd, 2> streams{{{out.read, POLLIN, 0}, {err.read, POLLIN, 0}}};
  const std::array<std::string*, 2> texts{&finished.out, &finished.err};
  // Also checks whether it has ended: a process that it has left behind may keep the streams open.
  while (!child.ended()) {
    if (::poll(streams.data(), streams.size(), 20) < 0 && errno != EINTR)
      fail(command.words[0], "waiting for its output", errno);
    for (std::size_t i = 0; i < streams.size(); ++i)
      if (streams[i].revents != 0 && !drain(streams[i].fd, *texts[i])) streams[i].fd = -1;
    interrupt.check();
    if (Clock::now() - finished.begin > command.limit)
      throw Error(ExitCode::retry, "running " + command.words[0],
                  "it has not ended within " + std::to_string(command.limit.count()) + " s", "Try again");
  }
  for (std::size_t i = 0; i < streams.size(); ++i)
    while (streams[i].fd >= 0 && ::poll(&streams[i], 1, 0) > 0)
      if (!drain(streams[i].fd, *texts[i])) streams[i].fd = -1;
  finished.code = child.code();
  return finished;
}

nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished) {
  auto result = nlohmann::ordered_json::parse(last_line(finished.out), nullptr, false);
  if (finished.code == 0 && !result.is_discarded()) return result;
  const auto reason = last_line(finished.err);
  throw Error(ExitCode::retry, doing,
              "it ended with exit code " + std::to_string(finished.code) +
                  (reason.empty() ? " and said nothing" : " and said last: " + reason));
}

std::string find_in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = std::filesystem::path(folder) / name;
    if (!folder.empty() && ::access(file.c_str(), X_OK) == 0) return file.string();
  }
  return {};
}

}  // namespace muster::bench
