// Runs a program and kills it at an exact system call: the N-th of those that change something in a folder is not made
// any more. All its threads and processes are watched, and count together.
//   kill_at FOLDER LOG N [--from TEXT] [--naming TEXT] PROGRAM ARGUMENTS…
// LOG gets a line for each such call: when, which, of what; the last one is that of the kill. Counted is from the first
// call on whose path has the one text, and only where it has the other. With N = 0 nothing is killed.
// Ends with the program's exit code, or with 77 if processes may not be traced.
//   kill_at --forks LIBRARY PROGRAM SCRIPT ARGUMENTS…
// Runs the script. Where it calls kill_at for that program, the program is a fork of a process that has loaded it; the
// library is that of support/forks.cpp.
#include "support/changing_calls.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

[[noreturn]] void fail(const char* doing) {
  std::perror(doing);
  std::exit(1);
}

std::string link(const std::string& path) {
  char target[PATH_MAX];
  const auto length = ::readlink(path.c_str(), target, sizeof target);
  return length > 0 ? std::string(target, static_cast<std::size_t>(length)) : std::string();
}

std::string text_at(pid_t thread, std::uint64_t address) {
  std::string text;
  for (char part[256]; text.size() < PATH_MAX;) {
    // At most to the end of the page, since the next one may not exist.
    const std::size_t bytes = std::min<std::uint64_t>(sizeof part, 4096 - address % 4096);
    const iovec to{part, bytes}, from{reinterpret_cast<void*>(address), bytes};
    const auto got = ::process_vm_readv(thread, &to, 1, &from, 1, 0);
    if (got <= 0) break;
    const auto length = ::strnlen(part, static_cast<std::size_t>(got));
    text.append(part, length);
    if (length < static_cast<std::size_t>(got)) break;
    address += static_cast<std::uint64_t>(got);
  }
  return text;
}

struct Watch {
  std::string folder, from, naming;
  std::FILE* log;
  long left;
};

std::string path_of(pid_t thread, const __ptrace_syscall_info& info, int descriptor, int path) {
  const auto here = "/proc/" + std::to_string(thread) + "/";
  const int number = descriptor < 0 ? AT_FDCWD : static_cast<int>(info.seccomp.args[descriptor]);
  if (path < 0) return link(here + "fd/" + std::to_string(number));
  const auto name = text_at(thread, info.seccomp.args[path]);
  if (name.starts_with('/')) return name;
  return link(number == AT_FDCWD ? here + "cwd" : here + "fd/" + std::to_string(number)) + "/" + name;
}

/// True if the call that the thread is about to make is the last one.
bool ends(pid_t thread, Watch& watch) {
  __ptrace_syscall_info info{};
  if (::ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof info, &info) <= 0) return false;  // it is gone
  const auto& call = muster::test::changing_calls.at(static_cast<long>(info.seccomp.nr));
  std::string of;
  if (call.flags >= 0 && (info.seccomp.args[call.flags] & (O_CREAT | O_TRUNC)) == 0) return false;
  if (call.descriptor >= 0 || call.path >= 0) {
    of = path_of(thread, info, call.descriptor, call.path);
    if (call.second_path >= 0) of += " " + path_of(thread, info, call.second_descriptor, call.second_path);
    if (of.find(watch.folder) == std::string::npos) return false;
  }
  if (of.find(watch.from) == std::string::npos) return false;
  watch.from.clear();
  if (of.find(watch.naming) == std::string::npos) return false;
  std::fprintf(watch.log, "%.6f %s %s\n",
               std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(), call.name,
               of.c_str());
  std::fflush(watch.log);
  return --watch.left == 0;
}

/// Ends with the child's status.
int end(int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  ::signal(WTERMSIG(status), SIG_DFL);
  ::raise(WTERMSIG(status));
  return 128 + WTERMSIG(status);
}

constexpr const char* forks_variable = "MUSTER_TEST_KILL_AT_FORKS";

/// Starts the process that forks, and becomes the script.
[[noreturn]] void run_with_forks(char** words) {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) fail("socketpair");
  const pid_t child = ::fork();
  if (child < 0) fail("fork");
  ::close(sockets[child == 0 ? 0 : 1]);
  const auto socket = std::to_string(sockets[child == 0 ? 1 : 0]);
  if (child == 0) {
    ::setenv("MUSTER_TEST_FORKS", socket.c_str(), 1);
    ::setenv("LD_PRELOAD", words[0], 1);
    ::execl(words[1], words[1], nullptr);
    fail(words[1]);
  }
  ::setenv(forks_variable, (socket + " " + words[1]).c_str(), 1);
  ::execv(words[2], words + 2);
  fail(words[2]);
}

/// The socket of the process that forks this program, or -1.
int forks_of(const char* program) {
  const char* const forks = std::getenv(forks_variable);
  char* name = nullptr;
  const auto socket = forks == nullptr ? -1 : static_cast<int>(std::strtol(forks, &name, 10));
  return name != nullptr && *name == ' ' && std::strcmp(name + 1, program) == 0 ? socket : -1;
}

/// Asks the process that forks for a child that waits on `started` for its tracer. See forks.cpp.
pid_t fork_loaded(int forks, int started, char** program) {
  std::string message, words;
  int count = 0;
  for (; program[count] != nullptr; ++count) (words += program[count]) += '\0';
  for (char** variable = ::environ; *variable != nullptr; ++variable) (words += *variable) += '\0';
  char folder[PATH_MAX];
  if (::getcwd(folder, sizeof folder) == nullptr) fail("getcwd");
  message = folder + ('\0' + std::to_string(count)) + '\0' + words + "MUSTER_TEST_TRACED=1" + '\0';
  const int streams[]{started, 1, 2};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof streams)]{};
  iovec data{message.data(), message.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  auto* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof streams);
  std::memcpy(CMSG_DATA(rights), streams, sizeof streams);
  std::int32_t child = 0;
  if (::sendmsg(forks, &header, MSG_NOSIGNAL) < 0 || ::recv(forks, &child, sizeof child, 0) != sizeof child)
    fail("asking for a fork");
  return child;
}

pid_t fork_and_load(int started, char** program) {
  const pid_t child = ::fork();
  if (child < 0) fail("fork");
  if (child == 0) {
    if (!muster::test::stop_at_changing_calls(started)) ::_exit(77);
    ::execvp(*program, program);
    fail(*program);
  }
  return child;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 64;
  if (std::strcmp(argv[1], "--forks") == 0) run_with_forks(argv + 2);
  Watch watch{
      .folder = argv[1], .from = "", .naming = "", .log = std::fopen(argv[2], "we"), .left = std::atol(argv[3])};
  if (watch.log == nullptr) fail(argv[2]);
  char** program = argv + 4;
  for (; program[1] != nullptr && std::strncmp(*program, "--", 2) == 0; program += 2)
    (std::strcmp(*program, "--from") == 0 ? watch.from : watch.naming) = program[1];

  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) fail("socketpair");
  const int forks = forks_of(*program);
  const pid_t child = forks < 0 ? fork_and_load(sockets[1], program) : fork_loaded(forks, sockets[1], program);
  ::close(sockets[1]);
  char byte = 0;
  if (::read(sockets[0], &byte, 1) != 1) fail("waiting for the program");
  const long options = PTRACE_O_EXITKILL | PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
                       PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC;
  if (::ptrace(PTRACE_SEIZE, child, nullptr, options) != 0) {
    ::kill(child, SIGKILL);
    std::printf("skipped: processes may not be traced here\n");
    return 77;
  }
  if (::write(sockets[0], &byte, 1) != 1) fail("starting the program");
  ::close(sockets[0]);
  for (;;) {
    int status = 0;
    pid_t thread = 0;
    do thread = ::waitpid(-1, &status, __WALL);
    while (thread < 0 && errno == EINTR);
    if (thread < 0) fail("waiting");
    if (WIFSTOPPED(status)) {
      const bool is_event = (status >> 16) != 0;
      if (status >> 8 == (SIGTRAP | (PTRACE_EVENT_SECCOMP << 8)) && ends(thread, watch)) ::kill(child, SIGKILL);
      ::ptrace(PTRACE_CONT, thread, nullptr, is_event ? 0L : static_cast<long>(WSTOPSIG(status)));
    } else if (thread == child) {
      std::int32_t again = 0;  // to the process that forks
      if (forks >= 0 && ::recv(forks, &again, sizeof again, 0) != sizeof again) fail("waiting for the fork");
      return end(status);
    }
  }
}
