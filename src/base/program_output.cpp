#include "base/program_output.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace muster::detail {
namespace {

using Clock = std::chrono::steady_clock;

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

}  // namespace

std::optional<std::string> output_of(std::vector<std::string> words, std::chrono::milliseconds limit) {
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
    text = read_all(ends[0], Clock::now() + limit);
    if (!text) ::kill(process, SIGKILL);
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(process, &status, 0)) < 0 && errno == EINTR) {
    }
    if (ended != process || status != 0) text.reset();
  }
  ::close(ends[0]);
  return text;
}

}  // namespace muster::detail
