// Runs a program and kills it at an exact system call: the N-th of those that change something in a folder is not made
// any more. All its threads and processes are watched, and count together.
//   kill_at FOLDER LOG N [--from TEXT] [--naming TEXT] PROGRAM ARGUMENTS…
// LOG gets a line for each such call: when, which, of what; the last one is that of the kill. Counted is from the first
// call on whose path has the one text, and only where it has the other.
// Ends with the program's exit code, or with 77 if processes may not be traced.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

/// What a call works on, by the numbers of its arguments: a descriptor, a path (relative to the descriptor if it has
/// both), and the flags of an open that may only read.
struct Call {
  const char* name;
  int descriptor = -1, path = -1, flags = -1, second_descriptor = -1, second_path = -1;
};

const std::map<long, Call> calls{
    {SYS_openat, {"openat", 0, 1, 2}},
    {SYS_write, {"write", 0}},
    {SYS_pwrite64, {"pwrite64", 0}},
    {SYS_writev, {"writev", 0}},
    {SYS_pwritev, {"pwritev", 0}},
    {SYS_pwritev2, {"pwritev2", 0}},
    {SYS_copy_file_range, {"copy_file_range", 2}},
    {SYS_sendfile, {"sendfile", 0}},
    {SYS_io_uring_enter, {"io_uring_enter"}},
    {SYS_ftruncate, {"ftruncate", 0}},
    {SYS_fallocate, {"fallocate", 0}},
    {SYS_fsync, {"fsync", 0}},
    {SYS_fdatasync, {"fdatasync", 0}},
    {SYS_sync_file_range, {"sync_file_range", 0}},
    {SYS_fchmod, {"fchmod", 0}},
    {SYS_mkdirat, {"mkdirat", 0, 1}},
    {SYS_unlinkat, {"unlinkat", 0, 1}},
    {SYS_fchmodat, {"fchmodat", 0, 1}},
    {SYS_linkat, {"linkat", 2, 3}},
    {SYS_symlinkat, {"symlinkat", 1, 2}},
    {SYS_renameat2, {"renameat2", 0, 1, -1, 2, 3}},
#ifdef SYS_renameat
    {SYS_renameat, {"renameat", 0, 1, -1, 2, 3}},
#endif
#ifdef SYS_open  // x86-64 has these calls, and aarch64 does not
    {SYS_open, {"open", -1, 0, 1}},
    {SYS_mkdir, {"mkdir", -1, 0}},
    {SYS_rename, {"rename", -1, 0, -1, -1, 1}},
    {SYS_rmdir, {"rmdir", -1, 0}},
    {SYS_unlink, {"unlink", -1, 0}},
    {SYS_chmod, {"chmod", -1, 0}},
    {SYS_link, {"link", -1, 1}},
    {SYS_symlink, {"symlink", -1, 1}},
#endif
};

[[noreturn]] void fail(const char* doing) {
  std::perror(doing);
  std::exit(1);
}

/// In the child, before the program.
void watch_calls() {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const auto& [number, call] : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    fail("watching system calls");
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
  const auto& call = calls.at(static_cast<long>(info.seccomp.nr));
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

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 64;
  Watch watch{
      .folder = argv[1], .from = "", .naming = "", .log = std::fopen(argv[2], "we"), .left = std::atol(argv[3])};
  if (watch.log == nullptr) fail(argv[2]);
  char** program = argv + 4;
  for (; program[1] != nullptr && std::strncmp(*program, "--", 2) == 0; program += 2)
    (std::strcmp(*program, "--from") == 0 ? watch.from : watch.naming) = program[1];

  const pid_t child = ::fork();
  if (child < 0) fail("fork");
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) {
      std::printf("skipped: processes may not be traced here\n");
      std::fflush(stdout);
      ::_exit(77);
    }
    ::raise(SIGSTOP);
    watch_calls();
    ::execvp(*program, program);
    fail(*program);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return end(status);
  const long options = PTRACE_O_EXITKILL | PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
                       PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC;
  if (::ptrace(PTRACE_SETOPTIONS, child, nullptr, options) != 0) fail("tracing");
  std::set<pid_t> known{child};
  for (pid_t thread = child;;) {
    long signal = 0;
    if (WIFSTOPPED(status)) {
      signal = WSTOPSIG(status);
      const bool is_event = (status >> 16) != 0;
      if (status >> 8 == (SIGTRAP | (PTRACE_EVENT_SECCOMP << 8)) && ends(thread, watch)) ::kill(child, SIGKILL);
      // A new attempt begins with a stop request.
      if (is_event || known.insert(thread).second || (thread == child && signal == SIGSTOP)) signal = 0;
      ::ptrace(PTRACE_CONT, thread, nullptr, signal);
    }
    do thread = ::waitpid(-1, &status, __WALL);
    while (thread < 0 && errno == EINTR);
    if (thread < 0) fail("waiting");
    if (thread == child && !WIFSTOPPED(status)) return end(status);
  }
}
