// The power fails before the n-th change of the disk, for every n of what a run does with its checkpoints, and what was
// not synced is lost: the newest checkpoint is whole all the same, and never older than the last one whose commit() or
// report() had returned.
//
// Changes of files of the run are counted, and from the n-th on they fail. Then the contents of files that were not
// synced go, and, as may be or not, the names in folders that were not.
#include "base/json.hpp"
#include "checkpoint/store.hpp"
#include "comm/mpi_scope.hpp"
#include "muster/error.hpp"
#include "observe/history.hpp"
#include "support/file_changes.hpp"
#include "support/folder.hpp"
#include "support/job.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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
using muster::test::FileChange;

std::error_code ignored;  // of undoing the name of what was pruned since

ino_t number_of(int descriptor) {
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

/// The disk of a run: what is not synced yet, and how it is undone.
class Disk final : public muster::test::FileWatcher {
 public:
  /// The power fails after so many changes below `folder`.
  void start(const fs::path& folder, int changes) {
    run_ = folder;
    left_ = changes;
    muster::test::watch_files(this);
  }
  bool failed() const { return left_ < 0; }

  void lose(bool names_too) {
    muster::test::watch_files(nullptr);
    for (const auto& [file, descriptor] : unsynced_) {
      if (::ftruncate(descriptor, 0) != 0) std::abort();
      ::close(descriptor);
    }
    unsynced_.clear();
    seen_.clear();
    for (; !names_.empty(); names_.pop_back())
      if (names_too) names_.back().undo();
  }

  bool before(const FileChange& change) override {
    using Kind = FileChange::Kind;
    if (!counts(change)) return true;
    if (left_ >= 0) --left_;
    if (failed()) {
      errno = EIO;
      return false;
    }
    if (change.kind == Kind::write) written(change.descriptor);
    if (change.kind == Kind::sync) synced(change.descriptor);
    if (change.kind == Kind::rename) {
      if (fs::path(change.path).extension() == ".saving") check_seen(change.path);
      replaced_ = spare_name_of(change.to);
    }
    return true;
  }

  void after(const FileChange& change) override {
    using Kind = FileChange::Kind;
    if (!counts(change)) return;
    const auto name = fs::path(change.path).filename();
    if (change.kind == Kind::create) named(change.path, [=](auto& folder) { fs::remove(folder / name, ignored); });
    if (change.kind == Kind::make_folder)
      named(change.path, [=](auto& folder) { fs::remove_all(folder / name, ignored); });
    if (change.kind == Kind::rename)
      named(change.to, [name, to = fs::path(change.to).filename(), replaced = std::move(replaced_)](auto& folder) {
        fs::rename(folder / to, folder / name, ignored);
        if (replaced) fs::rename(*replaced, folder / to, ignored);
      });
  }

 private:
  struct Name {
    ino_t folder;
    std::function<void()> undo;
  };

  bool counts(const FileChange& change) const {
    const bool kept = change.kind != FileChange::Kind::set_mode && change.kind != FileChange::Kind::link;
    return kept && change.path.starts_with(run_);
  }

  void written(int descriptor) {
    const auto file = number_of(descriptor);
    if (!unsynced_.contains(file)) unsynced_[file] = ::dup(descriptor);
    seen_.insert(file);
  }

  void synced(int descriptor) {
    const auto file = number_of(descriptor);
    if (const auto at = unsynced_.find(file); at != unsynced_.end()) {
      ::close(at->second);
      unsynced_.erase(at);
    }
    std::erase_if(names_, [&](const auto& name) { return name.folder == file; });
  }

  /// A change of a name: `undo` gets a path to its folder that stays right when that is renamed.
  void named(const fs::path& path, const std::function<void(const fs::path&)>& undo) {
    const std::shared_ptr<int> folder(new int(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY)),
                                      [](int* made) {
                                        ::close(*made);
                                        delete made;
                                      });
    names_.push_back({number_of(*folder), [=] { undo("/proc/self/fd/" + std::to_string(*folder)); }});
  }

  /// What is published has been written by calls that are counted here, so that they can be lost.
  void check_seen(const fs::path& folder) const {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      struct stat status {};
      if (!entry.is_regular_file() || ::stat(entry.path().c_str(), &status) != 0) continue;
      if (status.st_size == 0 || seen_.contains(status.st_ino)) continue;
      std::fprintf(stderr, "%s is written by calls that this test does not know\n", entry.path().c_str());
      std::_Exit(1);
    }
  }

  /// Renames what is there, and restores it later if asked to.
  std::shared_ptr<const fs::path> spare_name_of(const std::string& path) const {
    static int count = 0;
    const auto spare =
        fs::path(run_).parent_path() / ("muster-spare-" + std::to_string(::getpid()) + "." + std::to_string(count++));
    if (::link(path.c_str(), spare.c_str()) != 0) return nullptr;
    return {new fs::path(spare), [](const fs::path* name) {
              fs::remove(*name, ignored);
              delete name;
            }};
  }

  std::string run_;
  int left_ = 0;
  std::map<ino_t, int> unsynced_;             ///< files with contents that may be lost, by descriptors of our own
  std::set<ino_t> seen_;                      ///< files that were written
  std::vector<Name> names_;                   ///< not synced yet, in their order
  std::shared_ptr<const fs::path> replaced_;  ///< by the rename that is being made
} disk;

}  // namespace

namespace {

using muster::detail::checkpoint::CheckpointContents;
using muster::detail::checkpoint::CheckpointStore;

at::Tensor values_of(int number) { return at::arange(20'000, at::kDouble).add(number); }

/// The number of the newest checkpoint; none is −1.
int newest(CheckpointStore& store) {
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

  void start_counting() const { disk.start(folder.path(), changes); }
  void commit(CheckpointStore& store, int number) {
    const muster::test::Folder files;
    fs::create_directories(files / "notes");
    std::ofstream(files / "notes/a.txt") << "the user's own";
    may_be_found.insert(number);
    CheckpointContents contents;
    contents.state.tensors.emplace("w", values_of(number));
    contents.position_json = {{"number", number}};
    contents.directory = files;
    store.commit(contents);
    may_be_found = {number};
  }
};

void save_and_prune(Trial& trial) {
  CheckpointStore store(trial.world, trial.run, trial.config);
  trial.commit(store, 1);
  trial.start_counting();
  trial.commit(store, 2);
}

/// With all files that a run writes, and its parent folders.
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
                      session.report({{"last", 1}});
                    });
}

void set_aside(Trial& trial) {
  trial.config.num_to_keep = 3;
  trial.may_be_damaged = true;
  {
    CheckpointStore store(trial.world, trial.run, trial.config);
    trial.commit(store, 1);
    trial.commit(store, 2);
    fs::resize_file(muster::list_checkpoints(trial.run).back().path / "state.h5", 5000);
  }
  trial.may_be_found = {1};
  trial.start_counting();
  CheckpointStore store(trial.world, trial.run, trial.config);
  newest(store);
  trial.commit(store, 3);
}

void take_back(Trial& trial) {
  trial.config.num_to_keep = 3;
  trial.may_be_damaged = true;
  {
    CheckpointStore store(trial.world, trial.run, trial.config);
    trial.commit(store, 1);
    trial.commit(store, 2);
    const auto path = muster::list_checkpoints(trial.run).back().path;
    fs::rename(path, fs::path(path) += ".damaged");
  }
  trial.start_counting();
  CheckpointStore store(trial.world, trial.run, trial.config);
  newest(store);
  trial.commit(store, 3);
}

void roll_back(Trial& trial) {
  trial.config.num_to_keep = 3;
  CheckpointStore store(trial.world, trial.run, trial.config);
  trial.commit(store, 1);
  const auto first = store.newest()->path();
  trial.commit(store, 2);
  trial.commit(store, 3);
  trial.may_be_found = {1, 3};
  trial.start_counting();
  store.roll_back(*muster::detail::storage::Tier::index_of(first.filename()));
  store.confirm_rollback();
  trial.may_be_found = {1};
  trial.commit(store, 4);
}

/// True if the power failed before the end.
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
  if (const auto params = trial.run / "params.json"; fs::exists(params) && act == first_save_of_a_run) {
    const bool finished = muster::detail::read_json(params).value("finished", false);
    const auto rows = muster::detail::observe::History::read(trial.run).size();
    if (finished && rows != 2)
      throw std::runtime_error("the run is finished, and of 2 rows there are " + std::to_string(rows));
  }
  CheckpointStore store(world, trial.run, trial.config);
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
