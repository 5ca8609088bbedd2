#include "process.hpp"

#include "../interrupt.hpp"
#include "base/program.hpp"
#include "base/text.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <muster/error.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

namespace muster::bench {
namespace {

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

/// Kills the processes that a child has left behind, in whatever process group they are; they are now children of this
/// process.
void end_orphans() {
  const auto list = detail::str("/proc/self/task/", ::getpid(), "/children");
  for (bool any = true; any;) {
    any = false;
    std::ifstream children(list);
    for (pid_t child = 0; children >> child; any = true) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
  }
}

/// A child process with its process group and their orphans. The destructor ends them all.
class Child {
 public:
  Child(const Command& command, int out, int err);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { end(); }

  void end() {
    if (std::exchange(over_, true)) return;
    ::kill(-pid_, running_ ? SIGTERM : SIGKILL);
    // Wait, since a launcher that is asked to stop also ends its ranks.
    for (const auto last = Clock::now() + time_to_end; !ended() && Clock::now() < last;)
      std::this_thread::sleep_for(20ms);
    ::kill(-pid_, SIGKILL);
    if (running_) ::waitpid(pid_, nullptr, 0);
    end_orphans();
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
  bool over_ = false;
  int code_ = 0;
};

Child::Child(const Command& command, int out, int err) {
  auto words = command.words;
  auto variables = detail::environment_with(command.environment);
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  if (command.quiet) ::posix_spawn_file_actions_adddup2(&files, err, STDERR_FILENO);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // makes orphans children of this process
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  const int error = ::posix_spawnp(&pid_, words[0].c_str(), &files, &attributes, detail::pointers_to(words).data(),
                                   detail::pointers_to(variables).data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) fail(command.words[0], "it does not start", error);
}

/// Appends the data that can be read; returns false at the end of the file.
bool drain(int descriptor, std::string& text) {
  std::array<char, 65536> buffer{};
  const auto count = ::read(descriptor, buffer.data(), buffer.size());
  if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && (errno == EINTR || errno == EAGAIN));
}

/// Calls `on_line` with each complete line of `text`, and removes these lines.
void pass_on(std::string& text, const std::function<void(const std::string&)>& on_line) {
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = text.find('\n', begin)) != text.npos; begin = end + 1)
    on_line(text.substr(begin, end - begin));
  text.erase(0, begin);
}

/// Returns the last line that has a letter or a digit.
std::string last_line(const std::string& text) {
  std::istringstream stream(text);
  std::string last;
  for (std::string line; std::getline(stream, line);)
    if (std::ranges::any_of(line, [](unsigned char c) { return std::isalnum(c); })) last = line;
  return last;
}

/// Returns in one line why a program has failed: the error below the first Python traceback, otherwise the last line.
std::string cause_of(const std::string& err) {
  // Colours, and the prefixes of ranks and processes: "[rank0]: ", "(RayTrainWorker pid=7) ".
  const std::regex marks(R"(^(\x1b\[[0-9;]*m|\[\w+\]: ?|\(\w+ [^)]*\) ?)*)");
  std::istringstream stream(err);
  bool in_traceback = false;
  for (std::string line; std::getline(stream, line);) {
    line = std::regex_replace(line, marks, "");
    if (line.starts_with("Traceback ("))
      in_traceback = true;
    else if (in_traceback && !line.empty() && !line.starts_with(" "))
      return line;
  }
  return last_line(err);
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
  const auto read = [&](int wait_ms) {
    const int ready = ::poll(streams.data(), streams.size(), wait_ms);
    if (ready < 0 && errno != EINTR) fail(command.words[0], "waiting for its output", errno);
    for (std::size_t i = 0; i < streams.size(); ++i)
      if (ready > 0 && streams[i].revents != 0 && !drain(streams[i].fd, *texts[i])) streams[i].fd = -1;
    if (command.on_line) pass_on(finished.out, command.on_line);
    return ready > 0;
  };
  // Do not wait for the end of the streams: a process that the program has left behind may keep them open.
  while (!child.ended() && finished.end == End::itself) {
    read(20);
    if (tool::InterruptGuard::has_come())
      finished.end = End::interrupt;
    else if (Clock::now() > command.deadline)
      finished.end = End::deadline;
  }
  child.end();
  while (read(0)) continue;
  finished.code = child.code();
  return finished;
}

nlohmann::ordered_json result_of(const std::string& doing, const Finished& finished) {
  if (finished.end == End::deadline) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - finished.begin).count();
    throw Error(ExitCode::retry, doing, detail::str("it has not ended within ", seconds, " s"),
                "--rounds gives it more time");
  }
  auto result = nlohmann::ordered_json::parse(last_line(finished.out), nullptr, false);
  if (finished.code == 0 && !result.is_discarded()) return result;
  const auto cause = cause_of(finished.err);
  throw Error(
      ExitCode::retry, doing,
      detail::str("it ended with exit code ", finished.code, cause.empty() ? " and said nothing" : ": " + cause));
}

}  // namespace muster::bench
