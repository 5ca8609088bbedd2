#include "launch/supervised.hpp"

#include "base/host.hpp"
#include "base/text.hpp"
#include "base/thread.hpp"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

namespace muster::detail::launch {
namespace {

UnsupervisedScope* unsupervised = nullptr;

void kill_this_process() noexcept { ::kill(::getpid(), SIGKILL); }

void die_with_any(std::vector<pollfd> processes) noexcept {
  while (::poll(processes.data(), processes.size(), -1) < 0) {
  }
  kill_this_process();
}

bool is_supervised(pid_t process) {
  std::ifstream environment(str("/proc/", process, "/environ"), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(environment)), {});
  return text.find(str(variable::supervised, "=")) != std::string::npos;
}

/// Keeps the rank's process id in the environment, so that tell_exit() (stop_signal.cpp) knows a child of the rank. Not
/// done in stop_signal.cpp: libc is initialised after that library, and would lose the variable.
[[gnu::constructor]] void keep_rank_process() noexcept {
  if (std::getenv(supervised_variable) != nullptr)
    ::setenv(rank_process_variable, std::to_string(::getpid()).c_str(), /*overwrite=*/0);
}

}  // namespace

pid_t parent_of(pid_t process) {
  const auto text = first_line(str("/proc/", process, "/stat"));
  pid_t parent = 0;
  if (const auto name = text.rfind(')'); name != std::string::npos)
    std::sscanf(text.c_str() + name, ") %*c %d", &parent);
  return parent;
}

std::optional<Supervisor> supervisor() {
  if (unsupervised != nullptr || value_of(variable::supervised).empty()) return {};
  Supervisor found{.id = value_of(variable::id), .started = value_of(variable::started), .max_failures = {}};
  if (const auto most = value_of(variable::max_failures); !most.empty()) found.max_failures = std::atoi(most.c_str());
  if (const auto used = value_of(variable::used); !used.empty())
    found.used = std::chrono::seconds(std::atoll(used.c_str()));
  found.full_worker_count = std::atoi(value_of(variable::full_worker_count).c_str());
  return found;
}

void tell_supervisor(std::string_view what, std::string_view text) noexcept {
  if (unsupervised != nullptr) {
    if (what == message_stopped) unsupervised->stopped_without_state_ = true;
    return;
  }
  tell(what, text);
}

UnsupervisedScope::UnsupervisedScope() noexcept { unsupervised = this; }
UnsupervisedScope::~UnsupervisedScope() { unsupervised = nullptr; }

void end_with_launcher() noexcept try {
  const pid_t parent = ::getppid();
  std::vector<pollfd> processes;
  // There may be scripts between the launcher and this process; they have MUSTER_SUPERVISED, too.
  for (pid_t process = parent; process > 1; process = parent_of(process)) {
    if (process != parent && !is_supervised(process)) break;
    const auto descriptor = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
    if (descriptor >= 0) processes.push_back({descriptor, POLLIN, 0});
  }
  if (::getppid() != parent) kill_this_process();
  if (processes.empty()) {
    // The kernel has no pidfd_open(). PR_SET_PDEATHSIG watches only the parent's thread that has started this process,
    // not the whole parent.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    return;
  }
  start_thread("muster-launcher", [processes = std::move(processes)] { die_with_any(processes); }).detach();
} catch (const std::exception&) {  // no thread or memory: then this process ends only if its launcher ends it
}

}  // namespace muster::detail::launch
