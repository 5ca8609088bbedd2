#include "support/file_changes.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <utility>

namespace muster::test {
namespace {

using Kind = FileChange::Kind;

std::atomic<FileWatcher*> watching{nullptr};

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int descriptor) {
  char path[4096];
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : std::string();
}

/// The result of `call`, or −1 if the watcher forbids it. `describe` is called only if there is a watcher.
template <class Describe, class Call>
auto change(Describe describe, Call call) -> decltype(call()) {
  auto* const watcher = watching.load();
  if (watcher == nullptr) return call();
  const FileChange what = describe();
  if (!watcher->before(what)) return -1;
  const auto result = call();
  if (result >= 0) watcher->after(what);
  return result;
}

template <class Call>
auto change(Kind kind, int descriptor, Call call) -> decltype(call()) {
  return change([&] { return FileChange{.kind = kind, .path = path_of(descriptor), .descriptor = descriptor}; }, call);
}

template <class Call>
int change(Kind kind, const char* path, Call call, const char* to = "") {
  return change([&] { return FileChange{.kind = kind, .path = path, .to = to}; }, call);
}

int opened(const char* name, const char* path, int flags, mode_t mode) {
  const auto call = [&] { return original<int(const char*, int, ...)>(name)(path, flags, mode); };
  return (flags & O_CREAT) != 0 ? change(Kind::create, path, call) : call();
}

}  // namespace

void watch_files(FileWatcher* watcher) noexcept { watching = watcher; }

}  // namespace muster::test

using muster::test::change;
using muster::test::opened;
using muster::test::original;
using Kind = muster::test::FileChange::Kind;

// C code may use either of two names of each call.
extern "C" {

int open(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return opened("open", path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return opened("open64", path, flags, mode);
}
ssize_t write(int descriptor, const void* from, size_t bytes) {
  static auto* const real = original<ssize_t(int, const void*, size_t)>("write");
  return change(Kind::write, descriptor, [&] { return real(descriptor, from, bytes); });
}
ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  static auto* const real = original<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return change(Kind::write, descriptor, [&] { return real(descriptor, from, bytes, offset); });
}
ssize_t pwrite64(int descriptor, const void* from, size_t bytes, off64_t offset) {
  return pwrite(descriptor, from, bytes, offset);
}
ssize_t pwritev(int descriptor, const iovec* from, int count, off_t offset) {
  static auto* const real = original<ssize_t(int, const iovec*, int, off_t)>("pwritev");
  return change(Kind::write, descriptor, [&] { return real(descriptor, from, count, offset); });
}
ssize_t pwritev64(int descriptor, const iovec* from, int count, off64_t offset) {
  return pwritev(descriptor, from, count, offset);
}
int ftruncate(int descriptor, off_t bytes) noexcept {
  static auto* const real = original<int(int, off_t)>("ftruncate");
  return change(Kind::write, descriptor, [&] { return real(descriptor, bytes); });
}
int ftruncate64(int descriptor, off64_t bytes) noexcept { return ftruncate(descriptor, bytes); }
int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  static auto* const real = original<int(int, int, off_t, off_t)>("fallocate");
  return change(Kind::write, descriptor, [&] { return real(descriptor, mode, offset, bytes); });
}
int fallocate64(int descriptor, int mode, off64_t offset, off64_t bytes) {
  return fallocate(descriptor, mode, offset, bytes);
}
int posix_fallocate(int descriptor, off_t offset, off_t bytes) {  // gives its error in place of setting errno
  static auto* const real = original<int(int, off_t, off_t)>("posix_fallocate");
  int error = 0;
  const int made = change(Kind::write, descriptor, [&] {
    error = real(descriptor, offset, bytes);
    return error == 0 ? 0 : -1;
  });
  return made == 0 ? 0 : error != 0 ? error : errno;
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t bytes) {
  return posix_fallocate(descriptor, offset, bytes);
}
int fsync(int descriptor) {
  static auto* const real = original<int(int)>("fsync");
  return change(Kind::sync, descriptor, [&] { return real(descriptor); });
}
int fdatasync(int descriptor) {
  static auto* const real = original<int(int)>("fdatasync");
  return change(Kind::sync, descriptor, [&] { return real(descriptor); });
}
int mkdir(const char* path, mode_t mode) noexcept {
  return change(Kind::make_folder, path, [&] { return original<int(const char*, mode_t)>("mkdir")(path, mode); });
}
int chmod(const char* path, mode_t mode) noexcept {
  return change(Kind::set_mode, path, [&] { return original<int(const char*, mode_t)>("chmod")(path, mode); });
}
int rename(const char* from, const char* to) noexcept {
  return change(
      Kind::rename, from, [&] { return original<int(const char*, const char*)>("rename")(from, to); }, to);
}
int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) noexcept {
  static auto* const real = original<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return change(
      Kind::rename, from, [&] { return real(at, from, to_at, to, flags); }, to);
}
int symlink(const char* to, const char* path) noexcept {
  return change(
      Kind::link, path, [&] { return original<int(const char*, const char*)>("symlink")(to, path); }, to);
}
int unlink(const char* path) noexcept {
  return change(Kind::remove, path, [&] { return original<int(const char*)>("unlink")(path); });
}
int rmdir(const char* path) noexcept {
  return change(Kind::remove, path, [&] { return original<int(const char*)>("rmdir")(path); });
}
int unlinkat(int at, const char* path, int flags) noexcept {
  static auto* const real = original<int(int, const char*, int)>("unlinkat");
  const auto call = [&] { return real(at, path, flags); };
  return at == AT_FDCWD ? change(Kind::remove, path, call) : change(Kind::remove, at, call);
}
}
