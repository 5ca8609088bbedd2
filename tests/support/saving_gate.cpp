#include "support/saving_gate.hpp"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string_view>

namespace muster::test {
namespace {

std::mutex mutex;
std::condition_variable changed;
struct Closed {
  std::string part;
  int error;
};
std::optional<Closed> closed;
int waiting = 0;

/// The error of a folder that must not be made; 0 if it may, now.
int pass(std::string_view path) {
  std::unique_lock lock(mutex);
  if (!closed || !path.ends_with(".saving") || path.find(closed->part) == std::string_view::npos) return 0;
  if (closed->error != 0) return closed->error;
  ++waiting;
  changed.notify_all();
  changed.wait(lock, [] { return !closed; });
  --waiting;
  return 0;
}

}  // namespace

SavingGate::SavingGate(std::string part, int error) {
  const std::lock_guard lock(mutex);
  closed = Closed{std::move(part), error};
}

SavingGate::~SavingGate() { open(); }

void SavingGate::open() {
  const std::lock_guard lock(mutex);
  closed.reset();
  changed.notify_all();
}

void SavingGate::wait_for_one() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return waiting > 0; });
}

}  // namespace muster::test

extern "C" int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = reinterpret_cast<int (*)(const char*, mode_t)>(::dlsym(RTLD_NEXT, "mkdir"));
  if (const int error = muster::test::pass(path); error != 0) {
    errno = error;
    return -1;
  }
  return real(path, mode);
}
