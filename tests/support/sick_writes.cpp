#include "support/sick_writes.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <string_view>

namespace muster::test {
namespace {

std::atomic<const char*> sick_name{nullptr};
std::atomic<int> sick_error{0}, sick_count{0};

bool is_sick(int descriptor) {
  const char* const name = sick_name;
  if (name == nullptr) return false;
  char path[4096];
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return length > 0 && std::string_view(path, static_cast<std::size_t>(length)).find(name) != std::string_view::npos;
}

/// What becomes of a write: −1 with errno, or how many bytes are really to be written.
ssize_t allowed(int descriptor, size_t bytes) {
  if (!is_sick(descriptor)) return static_cast<ssize_t>(bytes);
  const int number = sick_count++;
  if (const int error = sick_error; error != 0 || number % 2 == 0) return errno = error != 0 ? error : EINTR, -1;
  constexpr size_t block = 4096;  // as direct I/O is cut
  return static_cast<ssize_t>(bytes >= 2 * block ? bytes / 2 / block * block : bytes > 1 ? bytes / 2 : bytes);
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

SickWrites::SickWrites(const char* name, int error) {
  sick_error = error;
  sick_count = 0;
  sick_name = name;
}
SickWrites::~SickWrites() { sick_name = nullptr; }
int SickWrites::count() const noexcept { return sick_count; }

}  // namespace muster::test

using namespace muster::test;

extern "C" {

ssize_t write(int descriptor, const void* from, size_t bytes) {
  static auto* const original = real<ssize_t(int, const void*, size_t)>("write");
  const auto most = allowed(descriptor, bytes);
  return most < 0 ? -1 : original(descriptor, from, static_cast<size_t>(most));
}
ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  static auto* const original = real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  const auto most = allowed(descriptor, bytes);
  return most < 0 ? -1 : original(descriptor, from, static_cast<size_t>(most), offset);
}
ssize_t pwrite64(int descriptor, const void* from, size_t bytes, off64_t offset) {
  return pwrite(descriptor, from, bytes, offset);
}
int fsync(int descriptor) {
  static auto* const original = real<int(int)>("fsync");
  if (!is_sick(descriptor)) return original(descriptor);
  const int number = sick_count++;
  if (const int error = sick_error; error != 0 || number % 2 == 0) return errno = error != 0 ? error : EINTR, -1;
  return original(descriptor);
}
}
