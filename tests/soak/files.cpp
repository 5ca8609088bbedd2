// Random hostile HDF5 files, used in every way that there is: soak/hostile_file.hpp.
//   file_storm SEED COUNT     COUNT files from this seed on; without end if COUNT is 0
//   file_storm one SEED       this file, in this process
// Files are used in a process of its own, which is started again after a crash. Crashes and endless loops inside of
// HDF5 are listed. Ends with 1 if any other function crashes, does not end, or throws something else than an Error.
#include "soak/hostile_file.hpp"
#include "support/folder.hpp"

#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <thread>

// So that the handler below sees every crash; a report of the sanitizer comes before it.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "handle_segv=0:handle_sigbus=0:handle_sigfpe=0:handle_abort=0:abort_on_error=1:detect_leaks=0:"
         "allocator_may_return_null=1:max_allocation_size_mb=3000";
}

namespace muster::soak {
namespace {

using Seed = std::uint64_t;
constexpr auto longest = std::chrono::seconds(60);  ///< of one file, also under a sanitizer
constexpr int at_once = 200;                        ///< files in one process, as what HDF5 does wrong may show later

/// What the process that uses files shares with the one that waits for it.
struct Shared {
  std::atomic<Seed> seed;
  std::atomic<int> done;
  std::array<char, 200> crash;  ///< where: a function of HDF5, or empty if it was outside of HDF5
};
Shared* shared = nullptr;

/// Looks for the innermost function that is either HDF5's or muster's: the C library and codecs are called by both.
void on_crash(int signal) {
  std::array<void*, 200> frames{};
  const auto count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  bool in_hdf5 = false, decided = false;
  const char* function = "?";
  for (int i = 2; i < count; ++i) {  // after this function and the system's return from it
    Dl_info info{};
    if (::dladdr(frames[static_cast<std::size_t>(i)], &info) == 0 || info.dli_fname == nullptr) continue;
    const bool hdf5 = std::strstr(info.dli_fname, "libhdf5") != nullptr;
    const bool ours =
        std::strstr(info.dli_fname, "muster") != nullptr || std::strstr(info.dli_fname, "file_storm") != nullptr;
    if (!decided && (hdf5 || ours)) decided = true, in_hdf5 = hdf5;
    if (decided && in_hdf5 && hdf5 && info.dli_sname != nullptr) function = info.dli_sname;
    if (decided && ours) break;
  }
  if (in_hdf5)
    std::strncpy(shared->crash.data(), function, shared->crash.size() - 1);
  else
    ::backtrace_symbols_fd(frames.data(), count, 2);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void handle_crashes() {
  static std::array<char, 1 << 16> stack;  // of its own, as a recursion without end leaves none
  const stack_t other{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  ::sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_handler = on_crash;
  action.sa_flags = SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigaction(signal, &action, nullptr);
  std::array<void*, 1> first{};
  ::backtrace(first.data(), 1);  // loads what it needs
}

int use_files(Seed first, Seed end, const std::filesystem::path& folder) {
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  handle_crashes();
  for (auto seed = first; seed < end; ++seed) {
    shared->seed = seed;
    try {
      write_hostile_file(seed, folder / "file.h5");
      shared->done += use_file(seed, folder / "file.h5", folder);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  }
  return 0;
}

/// Waits for the process that uses files, and ends it if it spends too long on one of them.
int wait_for(pid_t child) {
  auto seed = shared->seed.load();
  for (auto since = std::chrono::steady_clock::now();;) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const auto now = std::chrono::steady_clock::now();
    if (shared->seed != seed) seed = shared->seed, since = now;
    if (now - since > longest) ::kill(child, SIGABRT), since = now;
  }
}

struct Outcome {
  std::map<std::string, int> in_hdf5 = {};  ///< crashes by function
  int elsewhere = 0;
};

Outcome storm(Seed first, Seed count) {
  const test::Folder folder;
  Outcome outcome;
  for (auto seed = first; count == 0 || seed < first + count;) {
    const auto end = count == 0 ? seed + at_once : std::min<Seed>(seed + at_once, first + count);
    shared->seed = seed;
    shared->crash = {};
    std::fflush(nullptr);
    const auto child = ::fork();
    if (child == 0) ::_exit(use_files(seed, end, folder));
    const auto status = wait_for(child);
    const auto last = shared->seed.load();
    if (status == 0) {
      seed = end;
      continue;
    }
    seed = last + 1;
    if (const std::string where = shared->crash.data(); !where.empty()) {
      if (++outcome.in_hdf5[where + (WTERMSIG(status) == SIGABRT ? " (no end, or abort)" : "")] <= 3)
        std::printf("seed %llu: signal %d inside of HDF5, called by %s\n", static_cast<unsigned long long>(last),
                    WTERMSIG(status), where.c_str());
    } else {
      ++outcome.elsewhere;
      std::printf("seed %llu: FAILED with status %x\n", static_cast<unsigned long long>(last),
                  static_cast<unsigned>(status));
    }
    std::fflush(stdout);
  }
  return outcome;
}

}  // namespace
}  // namespace muster::soak

int main(int count, char** arguments) {
  using namespace muster::soak;
  if (count != 3) {
    std::fprintf(stderr, "file_storm SEED COUNT, or file_storm one SEED\n");
    return 64;
  }
  shared =
      static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto number = [](const char* text) { return std::strtoull(text, nullptr, 10); };
  if (arguments[1] == std::string_view("one")) {
    const auto seed = number(arguments[2]);
    return use_files(seed, seed + 1, std::filesystem::current_path());
  }
  const auto outcome = storm(number(arguments[1]), number(arguments[2]));
  for (const auto& [function, crashes] : outcome.in_hdf5)
    std::printf("inside of HDF5, called by %s: %d\n", function.c_str(), crashes);
  std::printf("%d uses succeeded; %d crashes or wrong exceptions outside of HDF5\n", shared->done.load(),
              outcome.elsewhere);
  return outcome.elsewhere == 0 ? 0 : 1;
}
