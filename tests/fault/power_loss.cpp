// The power fails before the n-th change of the disk, for every n of what a run does with its checkpoints, and what was
// not synced is lost: the newest checkpoint is whole all the same, and never older than the last one whose commit() or
// report() had returned.
//
// Calls of the C library that change files of the run are counted here, and from the n-th on they fail. Then the
// contents of files that were not synced go, and, as may be or not, the names in folders that were not.
#include "checkpoint/store.hpp"
#include "comm/world.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"
#include "support/job.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

struct Disk {
  std::string run;                     // what is watched; nothing where empty
  int left = 0;                        // changes until the power fails
  std::map<ino_t, int> unsynced = {};  // files with contents that may be lost, by descriptors of our own
  std::set<ino_t> seen = {};           // files that were written
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
  const auto file = number_of(descriptor);
  if (!disk.unsynced.contains(file)) disk.unsynced[file] = ::dup(descriptor);
  disk.seen.insert(file);
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

/// What is published has been written by calls that are counted here, so that they can be lost.
void check_seen(const fs::path& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    struct stat status {};
    if (!entry.is_regular_file() || ::stat(entry.path().c_str(), &status) != 0) continue;
    if (status.st_size == 0 || disk.seen.contains(status.st_ino)) continue;
    std::fprintf(stderr, "%s is written by calls that this test does not know\n", entry.path().c_str());
    std::_Exit(1);
  }
}

/// Another name for what stands there, for as long as it may come back.
std::shared_ptr<const fs::path> spare_name_of(const char* path) {
  static int count = 0;
  const auto spare =
      fs::path(disk.run).parent_path() / ("muster-spare-" + std::to_string(::getpid()) + "." + std::to_string(count++));
  if (::link(path, spare.c_str()) != 0) return nullptr;
  return {new fs::path(spare), [](const fs::path* name) {
            fs::remove(*name, ignored);
            delete name;
          }};
}

template <class Move>
int moved(const char* from, const char* to, Move move) {
  const bool watched = disk.watches(from);
  if (watched && !disk.change()) return -1;
  if (watched && fs::path(from).extension() == ".saving") check_seen(from);
  const auto replaced = watched ? spare_name_of(to) : nullptr;
  const int status = move();
  if (watched && status == 0)
    named(to, [replaced, from = fs::path(from).filename(), to = fs::path(to).filename()](auto& folder) {
      fs::rename(folder / to, folder / from, ignored);
      if (replaced) fs::rename(*replaced, folder / to, ignored);
    });
  return status;
}

int synced(const char* name, int descriptor) {
  auto* const real = original<int(int)>(name);
  if (disk.run.empty() || !disk.watches(path_of(descriptor))) return real(descriptor);
  if (!disk.change()) return -1;
  const auto file = number_of(descriptor);
  if (const auto at = disk.unsynced.find(file); at != disk.unsynced.end()) {
    ::close(at->second);
    disk.unsynced.erase(at);
  }
  std::erase_if(disk.names, [&](const auto& name) { return name.folder == file; });
  return real(descriptor);
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
int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  static auto* const real = original<int(int, int, off_t, off_t)>("fallocate");
  return changes(descriptor) ? real(descriptor, mode, offset, bytes) : -1;
}
int fallocate64(int descriptor, int mode, off64_t offset, off64_t bytes) {
  return fallocate(descriptor, mode, offset, bytes);
}
int posix_fallocate(int descriptor, off_t offset, off_t bytes) {
  static auto* const real = original<int(int, off_t, off_t)>("posix_fallocate");
  return changes(descriptor) ? real(descriptor, offset, bytes) : EIO;
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t bytes) {
  return posix_fallocate(descriptor, offset, bytes);
}
ssize_t pwritev(int descriptor, const iovec* from, int count, off_t offset) {
  static auto* const real = original<ssize_t(int, const iovec*, int, off_t)>("pwritev");
  return changes(descriptor) ? real(descriptor, from, count, offset) : -1;
}
ssize_t pwritev64(int descriptor, const iovec* from, int count, off64_t offset) {
  return pwritev(descriptor, from, count, offset);
}
int fsync(int descriptor) { return synced("fsync", descriptor); }
int fdatasync(int descriptor) { return synced("fdatasync", descriptor); }
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

/// The number of the newest checkpoint; none is −1.
int newest(Store& store) {
  const auto found = store.newest();
  if (!found) return -1;
  const auto w = store.read(*found).state.tensors.at("w");
  const int number = static_cast<int>(*w.const_data_ptr<double>());
  if (!at::equal(w, values_of(number))) throw std::runtime_error("the values are wrong");
  return number;
}

/// One run, of which the power may fail from start_counting() on.
struct Trial {
  const muster::Communicator& world;
  int changes;
  muster::test::Folder folder = {};
  fs::path run = folder.path();
  muster::CheckpointConfig config = {.num_to_keep = 1};
  std::set<int> may_be_found = {};
  bool may_be_damaged = false;

  void start_counting() const { disk = {.run = folder.path(), .left = changes}; }
  void commit(Store& store, int number) {
    const muster::test::Folder files;
    fs::create_directories(files / "notes");
    std::ofstream(files / "notes/a.txt") << "the user's own";
    may_be_found.insert(number);
    Contents contents;
    contents.state.tensors.emplace("w", values_of(number));
    contents.progress = {{"number", number}};
    contents.directory = files;
    store.commit(contents);
    may_be_found = {number};
  }
};

void save_and_prune(Trial& trial) {
  Store store(trial.world, trial.run, trial.config);
  trial.commit(store, 1);
  trial.start_counting();
  trial.commit(store, 2);
}

/// With all that a run writes, and the folders in which it stands.
void first_save_of_a_run(Trial& trial) {
  trial.run = trial.folder / "deep/er" / "run";
  trial.may_be_found = {-1};
  trial.start_counting();
  muster::test::run({.storage = trial.run.parent_path(), .options = {.run_config = {.name = "run"}}},
                    [&](muster::Session& session, const muster::Config&) {
                      auto w = values_of(1);
                      const auto state = session.state({{"w", w}});
                      trial.may_be_found.insert(1);
                      session.report({}, state);
                      trial.may_be_found = {1};
                    });
}

void set_aside(Trial& trial) {
  trial.config.num_to_keep = 3;
  trial.may_be_damaged = true;
  {
    Store store(trial.world, trial.run, trial.config);
    trial.commit(store, 1);
    trial.commit(store, 2);
    fs::resize_file(muster::list_checkpoints(trial.run).back().path / "state.h5", 5000);
  }
  trial.may_be_found = {1};
  trial.start_counting();
  Store store(trial.world, trial.run, trial.config);
  newest(store);
  trial.commit(store, 3);
}

void take_back(Trial& trial) {
  trial.config.num_to_keep = 3;
  trial.may_be_damaged = true;
  {
    Store store(trial.world, trial.run, trial.config);
    trial.commit(store, 1);
    trial.commit(store, 2);
    const auto path = muster::list_checkpoints(trial.run).back().path;
    fs::rename(path, fs::path(path) += ".damaged");
  }
  trial.start_counting();
  Store store(trial.world, trial.run, trial.config);
  newest(store);
  trial.commit(store, 3);
}

void roll_back(Trial& trial) {
  trial.config.num_to_keep = 3;
  Store store(trial.world, trial.run, trial.config);
  trial.commit(store, 1);
  const auto first = store.newest()->path();
  trial.commit(store, 2);
  trial.commit(store, 3);
  trial.may_be_found = {1, 3};
  trial.start_counting();
  store.roll_back(*muster::detail::checkpoint::Tier::index_of(first.filename()));
  trial.may_be_found = {1};
  trial.commit(store, 4);
}

/// Whether the power failed at all before the end.
bool lose_power(const muster::Communicator& world, void (*act)(Trial&), int changes, bool names_too) {
  Trial trial{.world = world, .changes = changes};
  try {
    act(trial);
  } catch (const muster::Error&) {
    if (!disk.failed()) throw;
  }
  const bool failed = disk.failed();
  disk.lose(names_too);
  const auto allowed = trial.may_be_found;
  if (!failed && allowed.size() != 1) throw std::runtime_error("it fails by itself");
  if (!fs::exists(trial.run) && allowed.contains(-1)) return failed;
  Store store(world, trial.run, trial.config);
  if (const int found = newest(store); !allowed.contains(found))
    throw std::runtime_error("number " + std::to_string(*allowed.rbegin()) + " was saved, and " +
                             std::to_string(found) + " is found");
  for (const auto& entry : fs::directory_iterator(trial.run))
    if (!trial.may_be_damaged && entry.path().filename().string().find("damaged") != std::string::npos)
      throw std::runtime_error("what is not whole was published");
  trial.commit(store, 9);
  if (newest(store) != 9) throw std::runtime_error("it does not go on");
  return failed;
}

}  // namespace

int main() {
  const muster::detail::comm::MpiScope environment;
  const std::pair<const char*, void (*)(Trial&)> cases[] = {{"a save and a pruning", save_and_prune},
                                                            {"the first save of a run", first_save_of_a_run},
                                                            {"one that is set aside", set_aside},
                                                            {"one that is taken back", take_back},
                                                            {"a step back", roll_back}};
  for (const auto& [name, act] : cases) {
    int count = 0;
    for (const bool names_too : {false, true})
      for (int changes = 0;; ++changes, ++count) try {
          if (!lose_power(environment.world(), act, changes, names_too)) break;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s: power lost after %d changes%s: %s\n", name, changes, names_too ? ", names too" : "",
                       error.what());
          return 1;
        }
    std::printf("%s: power lost at %d places\n", name, count);
    if (count < 5) return 1;
  }
}
