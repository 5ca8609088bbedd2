#include "supervise/job.hpp"

#include "base/log.hpp"
#include "base/program.hpp"
#include "base/supervisor_message.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace muster::detail::supervise {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

/// How long to wait for a launcher that was told to end its ranks on other nodes.
constexpr auto patience = 3s;

[[noreturn]] void fail(const char* what) {
  throw Error(ExitCode::retry, "starting the ranks", str(what, ": ", std::strerror(errno)),
              "Look at the limits of this machine (ulimit -a)");
}

/// Makes a pipe whose reading end never blocks; returns the writing end.
int make_pipe(int& reading_end) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("making a pipe");
  reading_end = ends[0];
  ::fcntl(reading_end, F_SETFL, O_NONBLOCK);
  return ends[1];
}

/// Runs in the child between vfork and exec, where only system calls are allowed.
[[noreturn]] void become(char* const* words, char* const* variables, pid_t parent, const sigset_t& blocked, int input,
                         int output, int error) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  // These signals would end the launcher, which later replaces this setting by its own handlers and passes them on to
  // its ranks.
  for (const int signal : {SIGUSR1, SIGUSR2}) ::signal(signal, SIG_IGN);
  for (const int signal : {SIGPIPE, SIGXFSZ}) ::signal(signal, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
  ::dup2(input, STDIN_FILENO);
  if (output >= 0) ::dup2(output, STDOUT_FILENO);
  ::dup2(error, STDERR_FILENO);
  ::execve(words[0], words, variables);
  ::_exit(127);
}

/// Returns the children of a process. Searches all processes, since not every kernel has /proc/PID/task/TID/children.
/// None if /proc does not show the processes.
std::optional<std::vector<pid_t>> children_of(pid_t process) {
  std::error_code no_proc;
  const fs::directory_iterator all("/proc", no_proc);
  if (no_proc || !Job::sees_processes()) return {};
  std::vector<pid_t> children;
  for (const auto& entry : all) {
    const auto child = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    if (child > 0 && launch::parent_of(child) == process) children.push_back(child);
  }
  return children;
}

/// Sends a signal to a process and all its descendants, ancestors first, so that a stopped process starts no more.
void signal_all(pid_t process, int signal) {
  std::vector<pid_t> all{process};
  for (std::size_t i = 0; i < all.size(); ++i) {
    ::kill(all[i], signal);
    const auto children = children_of(all[i]).value_or(std::vector<pid_t>());
    all.insert(all.end(), children.begin(), children.end());
  }
}

/// Kills all children of this process, and the orphans that become its children when these die.
void end_children() {
  for (const auto begin = std::chrono::steady_clock::now();;) {
    for (const auto child : children_of(::getpid()).value_or(std::vector<pid_t>())) ::kill(child, SIGKILL);
    pid_t ended = 0;
    while ((ended = ::waitpid(-1, nullptr, WNOHANG)) > 0) {
    }
    if (ended < 0) return;  // there are no children left
    if (std::chrono::steady_clock::now() - begin > 2 * patience)
      return log::warn(Job::sees_processes()
                           ? "a process of the job does not end; it waits for a device or a file system"
                           : "a process that the ranks have started goes on, and cannot be found without /proc");
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace

Job::Job(const LaunchCommand& command, const Launcher& launcher, bool has_remote_ranks)
    : launcher_(launcher), ranks_are_elsewhere_(launcher.uses_daemons() || has_remote_ranks) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  auto words = command.words;
  auto variables = environment_with(command.environment);
  // Set only if a rank of another job has started this process.
  std::erase_if(variables, [](const auto& text) { return text.starts_with(str(rank_process_variable, "=")); });
  const auto words_to = pointers_to(words), variables_to = pointers_to(variables);
  const int error_end = make_pipe(output_);
  const int output_end = launcher.uses_proxies ? make_pipe(standard_output_) : -1;
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const pid_t self = ::getpid();
  sigset_t blocked;
  ::sigemptyset(&blocked);
  // When a batch system is about to end a job, it sends SIGTERM to all its processes. The ranks then save, but mpirun
  // would kill them, so it starts with SIGTERM blocked (its ranks do not inherit that). srun needs no such protection.
  if (!ranks_are_elsewhere_ && in_batch_job()) ::sigaddset(&blocked, SIGTERM);
  process_ = ::vfork();  // unlike fork, copies no page tables, which with libtorch takes milliseconds
  if (process_ == 0) become(words_to.data(), variables_to.data(), self, blocked, nothing, output_end, error_end);
  ::close(error_end);
  if (output_end >= 0) ::close(output_end);
  ::close(nothing);
  if (process_ < 0) {
    close(output_);
    close(standard_output_);
    fail("starting a process");
  }
}

std::string Job::read(int& source) {
  std::string text;
  std::array<char, 16384> buffer{};
  ssize_t count = 0;
  while ((count = ::read(source, buffer.data(), buffer.size())) > 0)
    text.append(buffer.data(), static_cast<std::size_t>(count));
  if (count == 0) close(source);
  return text;
}

bool Job::ended() {
  int status = 0;
  // Also collects orphans of the job, which otherwise would stay zombies until the job ends.
  for (pid_t child = 0; (child = ::waitpid(-1, &status, WNOHANG)) > 0;)
    if (child == process_ && !status_) status_ = status;
  return status_.has_value();
}

int Job::code() const noexcept { return status_ && WIFEXITED(*status_) ? WEXITSTATUS(*status_) : 0; }
int Job::signal() const noexcept { return status_ && WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0; }

void Job::end_left_behind() {
  if (ranks_are_elsewhere_) return;
  const auto children = children_of(process_);
  if (!children) return;
  const bool has_ranks = launcher_.uses_proxies
                             ? std::ranges::any_of(*children, [](pid_t child) { return !children_of(child)->empty(); })
                             : !children->empty();
  const auto own = children_of(::getpid()).value_or(std::vector<pid_t>());
  const bool has_orphans = std::ranges::any_of(own, [&](pid_t child) { return child != process_; });
  had_ranks_ = had_ranks_ || has_ranks || has_orphans;  // a rank may have started and ended between two calls
  calls_without_ranks_ = has_ranks || !had_ranks_ ? 0 : calls_without_ranks_ + 1;
  if (calls_without_ranks_ < 2) return;  // the launcher may be about to end
  for (const auto child : own)
    if (child != process_) ::kill(child, SIGKILL);
}

bool Job::sees_processes() noexcept {
  std::error_code ignored;
  return fs::read_symlink("/proc/self", ignored) == std::to_string(::getpid());
}

bool Job::ask_to_stop() {
  const auto ranks = children_of(process_);
  had_ranks_ = had_ranks_ || (ranks && !ranks->empty());
  if (!launcher_.uses_daemons() && ranks && ranks->empty()) return false;
  ::kill(process_, SIGUSR1);
  return true;
}

bool Job::suspend() const {
  if (ranks_are_elsewhere_ || !sees_processes()) return false;
  signal_all(process_, SIGSTOP);
  return true;
}

void Job::resume() const { signal_all(process_, SIGCONT); }

void Job::end() {
  // Here SIGKILL to the launcher would not reach the ranks: srun's ranks are children of Slurm's daemons, and mpirun's
  // ranks on other hosts are children of its own daemons. SIGTERM makes the launcher have the daemons kill the ranks.
  // mpirun then also removes its files in /dev/shm.
  if (!ended() && ranks_are_elsewhere_) {
    launcher_.end(process_);
    for (const auto begin = std::chrono::steady_clock::now();
         !ended() && std::chrono::steady_clock::now() - begin < patience;)
      std::this_thread::sleep_for(10ms);
  }
  if (!ended()) {
    ::kill(process_, SIGKILL);
    int status = 0;
    if (::waitpid(process_, &status, 0) == process_) status_ = status;
  }
  end_children();
}

void Job::close(int& file) noexcept {
  if (file >= 0) ::close(file);
  file = -1;
}

}  // namespace muster::detail::supervise
