#include "watch/process.hpp"

#include "base/text.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

namespace muster::detail::watch {
namespace {

/// Returns the fields of /proc/PID/stat after the process's name, which may contain any character. The first is the
/// state.
std::string stat_after_name(pid_t process) {
  std::ifstream file(str("/proc/", process, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto end = text.rfind(')');
  return end == std::string::npos ? "" : text.substr(end + 1);
}

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// Shared by take() and the signal handler.
constexpr int most_frames = 40;
std::array<void*, most_frames> frames;
std::atomic<int> count{0};
std::atomic<bool> taken{false};
pthread_t main_thread;
pid_t main_id = 0;

std::mutex taking;

int signal_number() { return SIGRTMIN + 11; }

void handle(int) {
  const int error = errno;
  if (!taken.load(std::memory_order_acquire)) {
    count = ::backtrace(frames.data(), most_frames);
    taken.store(true, std::memory_order_release);
  }
  errno = error;
}

std::string name_of(void* address) {
  constexpr std::size_t longest = 160;
  Dl_info info{};
  if (::dladdr(address, &info) == 0) return "?";
  std::ostringstream text;
  const auto object = std::filesystem::path(info.dli_fname == nullptr ? "?" : info.dli_fname).filename().string();
  if (info.dli_sname == nullptr) {
    text << object << "+0x" << std::hex << static_cast<const char*>(address) - static_cast<const char*>(info.dli_fbase);
    return text.str();
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status),
                                                     std::free);
  std::string name = status == 0 ? plain.get() : info.dli_sname;
  if (name.size() > longest) name.resize(longest), name += "…";
  return name + " in " + object;
}

}  // namespace

std::int64_t start_time_of(pid_t process) noexcept try {
  std::istringstream fields(stat_after_name(process));
  std::string field;
  constexpr int of_start = 20;  // number of the field of the start time, counted from 1 after the name
  for (int i = 0; i < of_start; ++i)
    if (!(fields >> field)) return 0;
  return std::strtoll(field.c_str(), nullptr, 10);
} catch (...) {
  return 0;
}

std::string state_of(pid_t process, std::int64_t started) {
  std::istringstream fields(stat_after_name(process));
  std::string state;
  fields >> state;
  if (state.empty() || start_time_of(process) != started) return str("its process ", process, " is gone");
  const auto where = first_word(str("/proc/", process, "/wchan"));
  const auto in = where.empty() || where == "0" ? "" : ", in " + where;
  const char letter = state.front();
  if (letter == 'T') return "it is stopped (State T" + in + "): by SIGSTOP or the like";
  if (letter == 't') return "a debugger holds it (State t" + in + ")";
  if (letter == 'Z') return str("its process ", process, " has ended (State Z)");
  if (letter == 'X') return str("its process ", process, " is dead (State X)");
  return letter == 'D' ? "it waits in the kernel (State D" + in + ")" : "";
}

MainThreadStack::MainThreadStack() {
  main_thread = ::pthread_self();
  main_id = static_cast<pid_t>(::syscall(SYS_gettid));
  void* first = nullptr;
  ::backtrace(&first, 1);  // the first call loads a library, which must not happen in a signal handler
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  ::sigaction(signal_number(), &action, &before_);
}

MainThreadStack::~MainThreadStack() {
  // A signal that comes after this must not end the process.
  if (before_.sa_handler == SIG_DFL) before_.sa_handler = SIG_IGN;
  ::sigaction(signal_number(), &before_, nullptr);
}

std::string MainThreadStack::take() const {
  using namespace std::chrono_literals;
  const std::lock_guard one_at_a_time(taking);
  taken.store(false, std::memory_order_release);
  ::pthread_kill(main_thread, signal_number());
  const auto end = std::chrono::steady_clock::now() + 150ms;
  while (!taken.load(std::memory_order_acquire)) {
    if (std::chrono::steady_clock::now() > end) {
      taken.store(true, std::memory_order_release);  // the handler ignores the signal if it comes later
      const auto where = first_word(str("/proc/self/task/", main_id, "/wchan"));
      return "no stack: its main thread does not react to signals" +
             (where.empty() || where == "0" ? "" : ", in " + where);
    }
    std::this_thread::sleep_for(1ms);
  }
  std::string text;
  constexpr int signal_frames = 2;  // the handler's own frame and the kernel's
  for (int i = signal_frames; i < count; ++i)
    text += (text.empty() ? "" : "\n") + name_of(frames[static_cast<std::size_t>(i)]);
  return text;
}

}  // namespace muster::detail::watch
