#include "support/io_errors.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <stdexcept>

namespace muster::test {
namespace {

struct Injected {
  std::string call, name;
  int error;
};
std::atomic<const Injected*> injected{nullptr};
std::atomic<int> failures{0};

bool fails(const char* call, std::string_view path) {
  const auto* what = injected.load();
  if (what == nullptr || what->call != call || !path.ends_with(what->name)) return false;
  ++failures;
  if (what->error == 0) return false;
  errno = what->error;
  return true;
}

bool fails(const char* call, int descriptor) {
  if (injected.load() == nullptr) return false;
  char path[4096];
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return length > 0 && fails(call, std::string_view(path, static_cast<std::size_t>(length)));
}

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

int opened(const char* name, const char* path, int flags, std::va_list arguments) {
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  if (fails("open", path)) return -1;
  return original<int(const char*, int, ...)>(name)(path, flags, mode);
}

}  // namespace

IoError::IoError(std::string call, std::string name, int error) {
  if (injected.load() != nullptr) throw std::logic_error("there is an IoError already");
  failures = 0;
  injected = new Injected{std::move(call), std::move(name), error};
}

IoError::~IoError() { delete injected.exchange(nullptr); }

int IoError::count() const noexcept { return failures; }

}  // namespace muster::test

using muster::test::fails;
using muster::test::injected;
using muster::test::opened;
using muster::test::original;

// C code may use either of two names of each call.
extern "C" {

int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const int descriptor = opened("open", path, flags, arguments);
  va_end(arguments);
  return descriptor;
}
int open64(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const int descriptor = opened("open64", path, flags, arguments);
  va_end(arguments);
  return descriptor;
}
ssize_t pread(int descriptor, void* into, size_t bytes, off_t offset) {
  static auto* const real = original<ssize_t(int, void*, size_t, off_t)>("pread");
  return fails("pread", descriptor) ? -1 : real(descriptor, into, bytes, offset);
}
ssize_t pread64(int descriptor, void* into, size_t bytes, off64_t offset) {
  static auto* const real = original<ssize_t(int, void*, size_t, off64_t)>("pread64");
  return fails("pread", descriptor) ? -1 : real(descriptor, into, bytes, offset);
}
ssize_t preadv(int descriptor, const iovec* into, int count, off_t offset) {
  static auto* const real = original<ssize_t(int, const iovec*, int, off_t)>("preadv");
  return fails("preadv", descriptor) ? -1 : real(descriptor, into, count, offset);
}
ssize_t preadv2(int descriptor, const iovec* into, int count, off_t offset, int flags) {
  static auto* const real = original<ssize_t(int, const iovec*, int, off_t, int)>("preadv2");
  return fails("preadv2", descriptor) || fails("preadv", descriptor) ? -1
                                                                     : real(descriptor, into, count, offset, flags);
}
int fstat(int descriptor, struct stat* into) noexcept {
  static auto* const real = original<int(int, struct stat*)>("fstat");
  return fails("fstat", descriptor) ? -1 : real(descriptor, into);
}
int fstat64(int descriptor, struct stat64* into) noexcept {
  static auto* const real = original<int(int, struct stat64*)>("fstat64");
  return fails("fstat", descriptor) ? -1 : real(descriptor, into);
}
int lstat(const char* path, struct stat* into) noexcept {
  static auto* const real = original<int(const char*, struct stat*)>("lstat");
  return fails("lstat", path) ? -1 : real(path, into);
}
int lstat64(const char* path, struct stat64* into) noexcept {
  static auto* const real = original<int(const char*, struct stat64*)>("lstat64");
  return fails("lstat", path) ? -1 : real(path, into);
}
// The names of older C libraries, which libtorch's own copy of std::filesystem calls.
int __lxstat(int, const char* path, struct stat* into) noexcept { return lstat(path, into); }
int __lxstat64(int, const char* path, struct stat64* into) noexcept { return lstat64(path, into); }
DIR* opendir(const char* path) {
  static auto* const real = original<DIR*(const char*)>("opendir");
  return fails("opendir", path) ? nullptr : real(path);
}
// A folder may be opened like a file.
int openat(int at, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  static auto* const real = original<int(int, const char*, int, ...)>("openat");
  return (flags & O_DIRECTORY) != 0 && fails("opendir", path) ? -1 : real(at, path, flags, mode);
}
int openat64(int at, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(at, path, flags, mode);
}
// Only where it reads a mapped file; whose address it is, is not looked up.
int madvise(void* address, size_t bytes, int advice) noexcept {
  static auto* const real = original<int(void*, size_t, int)>("madvise");
  const auto* what = injected.load();
  constexpr int populate_read = 22;
  return what != nullptr && advice == populate_read && fails("madvise", what->name) ? -1 : real(address, bytes, advice);
}
// Under the new name; without flags it is a plain rename.
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) noexcept {
  static auto* const real = original<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return flags != 0 && fails("renameat2", to) ? -1 : real(from_at, from, to_at, to, flags);
}
int rmdir(const char* path) noexcept {
  static auto* const real = original<int(const char*)>("rmdir");
  return fails("rmdir", path) ? -1 : real(path);
}
// It returns the error instead of setting errno.
int posix_fallocate(int descriptor, off_t offset, off_t bytes) {
  static auto* const real = original<int(int, off_t, off_t)>("posix_fallocate");
  return fails("posix_fallocate", descriptor) ? errno : real(descriptor, offset, bytes);
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t bytes) {
  return posix_fallocate(descriptor, offset, bytes);
}
}
