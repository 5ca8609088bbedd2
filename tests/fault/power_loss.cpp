// The power fails before the n-th change of the disk, for every n of a commit, and what was not synced is lost: the
// newest checkpoint is whole all the same, and never older than the last one whose commit() had returned.
//
// Calls of the C library that change files of the run are counted here, and from the n-th on they fail. Then the
// contents of files that were not synced go, and, as may be or not, the names in folders that were not.
#include "checkpoint/store.hpp"
#include "comm/world.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct Disk {
  std::string run;                     // what is watched; nothing where empty
  int left = 0;                        // changes until the power fails
  std::map<ino_t, int> unsynced = {};  // files with contents that may be lost, by descriptors of our own
  struct Name {
    ino_t folder;
    std::function<void()> undo;
  };
  std::vector<Name> names = {};  // not synced yet, in their order

  bool failed() const { return left < 0; }
  bool watches(const std::string& path) const { return !run.empty() && path.starts_with(run); }
  /// False, with errno, if the power has failed.
  bool change() {
    if (left >= 0) --left;
    if (failed()) errno = EIO;
    return !failed();
  }
  void lose(bool names_too) {
    run.clear();
    for (const auto& [file, descriptor] : unsynced) {
      if (::ftruncate(descriptor, 0) != 0) std::abort();
      ::close(descriptor);
    }
    unsynced.clear();
    for (; !names.empty(); names.pop_back())
      if (names_too) names.back().undo();
  }
} disk;

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int descriptor) {
  char path[4096];
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
  return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : std::string();
}

ino_t number_of(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

/// A change of a file's contents: whether it may go on.
bool changes(int descriptor) {
  if (disk.run.empty() || !disk.watches(path_of(descriptor))) return true;
  if (!disk.change()) return false;
  if (const auto file = number_of(descriptor); !disk.unsynced.contains(file)) disk.unsynced[file] = ::dup(descriptor);
  return true;
}

std::error_code ignored;  // of undoing the name of what was pruned since

/// A change of a name: `undo` gets a path to its folder that stays right when that is renamed.
void named(const fs::path& path, const std::function<void(const fs::path&)>& undo) {
  const std::shared_ptr<int> folder(new int(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY)), [](int* made) {
    ::close(*made);
    delete made;
  });
  disk.names.push_back({number_of(*folder), [=] { undo("/proc/self/fd/" + std::to_string(*folder)); }});
}

int opened(const char* name, const char* path, int flags, mode_t mode) {
  const bool makes = (flags & O_CREAT) != 0 && disk.watches(path);
  if (makes && !disk.change()) return -1;
  const int descriptor = original<int(const char*, int, ...)>(name)(path, flags, mode);
  if (makes && descriptor >= 0)
    named(path, [name = fs::path(path).filename()](auto& folder) { fs::remove(folder / name, ignored); });
  return descriptor;
}

template <class Move>
int moved(const char* from, const char* to, Move move) {
  const bool watched = disk.watches(from);
  if (watched && !disk.change()) return -1;
  const int status = move();
  if (watched && status == 0)
    named(to, [from = fs::path(from).filename(), to = fs::path(to).filename()](auto& folder) {
      fs::rename(folder / to, folder / from, ignored);
    });
  return status;
}

int removed(const char* name, const char* path) {
  if (disk.watches(path) && !disk.change()) return -1;
  return original<int(const char*)>(name)(path);
}

}  // namespace

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
  return changes(descriptor) ? real(descriptor, from, bytes) : -1;
}
ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  static auto* const real = original<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return changes(descriptor) ? real(descriptor, from, bytes, offset) : -1;
}
ssize_t pwrite64(int descriptor, const void* from, size_t bytes, off64_t offset) {
  return pwrite(descriptor, from, bytes, offset);
}
int ftruncate(int descriptor, off_t bytes) noexcept {
  static auto* const real = original<int(int, off_t)>("ftruncate");
  return changes(descriptor) ? real(descriptor, bytes) : -1;
}
int ftruncate64(int descriptor, off64_t bytes) noexcept { return ftruncate(descriptor, bytes); }
int fsync(int descriptor) {
  static auto* const real = original<int(int)>("fsync");
  if (disk.run.empty() || !disk.watches(path_of(descriptor))) return real(descriptor);
  if (!disk.change()) return -1;
  const auto synced = number_of(descriptor);
  if (const auto at = disk.unsynced.find(synced); at != disk.unsynced.end()) {
    ::close(at->second);
    disk.unsynced.erase(at);
  }
  std::erase_if(disk.names, [&](const auto& name) { return name.folder == synced; });
  return real(descriptor);
}
int mkdir(const char* path, mode_t mode) noexcept {
  const bool watched = disk.watches(path);
  if (watched && !disk.change()) return -1;
  const int status = original<int(const char*, mode_t)>("mkdir")(path, mode);
  if (watched && status == 0)
    named(path, [name = fs::path(path).filename()](auto& folder) { fs::remove_all(folder / name, ignored); });
  return status;
}
int rename(const char* from, const char* to) noexcept {
  return moved(from, to, [&] { return original<int(const char*, const char*)>("rename")(from, to); });
}
int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) noexcept {
  return moved(from, to, [&] {
    return original<int(int, const char*, int, const char*, unsigned)>("renameat2")(at, from, to_at, to, flags);
  });
}
int unlink(const char* path) noexcept { return removed("unlink", path); }
int rmdir(const char* path) noexcept { return removed("rmdir", path); }
int unlinkat(int at, const char* path, int flags) noexcept {
  static auto* const real = original<int(int, const char*, int)>("unlinkat");
  if (!disk.run.empty() && disk.watches(at == AT_FDCWD ? path : path_of(at)) && !disk.change()) return -1;
  return real(at, path, flags);
}
}

namespace {

using muster::detail::checkpoint::Contents;
using muster::detail::checkpoint::Store;

at::Tensor values_of(int number) { return at::arange(20'000, at::kDouble).add(number); }

Contents contents_of(int number, const fs::path& files) {
  Contents contents;
  contents.state.tensors.emplace("w", values_of(number));
  contents.progress = {{"number", number}};
  contents.directory = files;
  return contents;
}

/// The number of the newest checkpoint; none is −1.
int newest(Store& store) {
  const auto found = store.newest();
  if (!found) return -1;
  const auto restored = store.read(*found);
  const auto number = restored.progress.at("number").get<int>();
  if (!at::equal(restored.state.tensors.at("w"), values_of(number))) throw std::runtime_error("the values are wrong");
  return number;
}

/// Whether the power failed at all before the commit had ended.
bool lose_power(const muster::Communicator& world, int changes, bool names_too) {
  const muster::test::Folder run, files;
  fs::create_directories(files / "notes");
  std::ofstream(files / "notes/a.txt") << "the user's own";
  int committed = 1;
  {
    Store store(world, run, {.num_to_keep = 1});
    store.commit(contents_of(1, files));
    disk = {.run = run.path(), .left = changes};
    try {
      store.commit(contents_of(2, files));
      committed = 2;
    } catch (const muster::Error&) {
      if (!disk.failed()) throw;
    }
  }
  const bool failed = disk.failed();
  disk.lose(names_too);
  Store store(world, run, {.num_to_keep = 1});
  if (const int found = newest(store); found < committed)
    throw std::runtime_error("number " + std::to_string(committed) + " was committed, and " + std::to_string(found) +
                             " is found");
  for (const auto& entry : fs::directory_iterator(run.path()))
    if (entry.path().filename().string().find("damaged") != std::string::npos)
      throw std::runtime_error("what is not whole was published");
  store.commit(contents_of(3, files));
  if (newest(store) != 3) throw std::runtime_error("it does not go on");
  return failed;
}

}  // namespace

int main() {
  const muster::detail::comm::MpiScope environment;
  int count = 0;
  for (const bool names_too : {false, true})
    for (int changes = 0;; ++changes, ++count) try {
        if (!lose_power(environment.world(), changes, names_too)) break;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "power lost after %d changes%s: %s\n", changes, names_too ? ", names too" : "",
                     error.what());
        return 1;
      }
  std::printf("power lost at %d places\n", count);
  return count > 20 ? 0 : 1;
}
