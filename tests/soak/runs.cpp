// Plays random sequences of starts, saves, rollbacks and losses of one run in one process, and compares them with a
// model that says what a start must find. File operations are counted. A drawn one fails; or it and all later ones
// fail, as if the process had died there.
//   mpirun -n 1 runs --first SEED --count SEQUENCES
//   mpirun -n 1 runs --seed SEED                       one sequence, printed step by step
//   mpirun -n RANKS runs --first SEED --count RUNS     on several ranks: runs whose checkpoints are validated
//   mpirun -n RANKS runs --killed SEED --start N --ending FILE --name NAME --storage FOLDER
// The last form is one start of a real run: ranks or mpirun are killed, or the run is stopped or throws. FILE.ending
// holds "kill" or the exit code. FILE.compared exists once the run has finished.
#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/store.hpp"
#include "muster/error.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "soak/started_runs.hpp"
#include "soak/validated_runs.hpp"
#include "storage/folder_tier.hpp"
#include "support/file_changes.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

namespace fs = std::filesystem;
using detail::checkpoint::CheckpointContents;
using detail::checkpoint::CheckpointStore;
using detail::storage::FolderTier;

/// Counts changes of files whose path begins with `watched`, and makes them fail from a drawn one on.
class Disk final : public test::FileWatcher {
 public:
  std::string watched = {};
  bool hit = false;
  bool dies = false;  ///< all later changes fail too

  ~Disk() { disarm(); }
  /// Lets `changes` changes succeed; the next one fails with the errno `with`.
  void arm(int changes, bool and_dies, int with) {
    const std::lock_guard lock(mutex_);
    left_ = changes, dies = and_dies, error_ = with, hit = false;
    test::watch_files(this);
  }
  void disarm() {
    test::watch_files(nullptr);
    const std::lock_guard lock(mutex_);
    hit = false;
  }
  bool before(const test::FileChange& change) override {
    const std::lock_guard lock(mutex_);
    if (!change.path.starts_with(watched)) return true;
    if (left_ > 0) return --left_, true;
    if (hit && !dies) return true;
    hit = true;
    errno = error_;
    return false;
  }

 private:
  std::mutex mutex_;
  int left_ = 0, error_ = 0;
} disk;

/// Thrown if something is wrong.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

at::Tensor values_of(int number) { return at::arange(12'000, at::kDouble).add(number); }

/// A checkpoint on the disk, as its manifest describes it.
struct Saved {
  int number = 0;
  double score = 0;
  std::string name = {};
};

class Sequence {
 public:
  Sequence(const Communicator& world, const Round& round)
      : world_(world),
        dice_(round.seed * 0x9e3779b97f4a7c15ULL + 11),
        aloud_(round.aloud),
        run_(round.folder / "run"),
        fast_(round.folder / "fast"),
        away_(round.folder / "away") {
    for (const auto& folder : {run_, fast_, away_}) fs::create_directory(folder);
    disk.watched = round.folder.string();
  }
  ~Sequence() {
    disk.disarm();
    store_.reset();
  }

  void play() {
    start();
    for (int steps = dice_.between(4, 20); steps > 0; --steps) {
      if (dice_.chance(0.7)) {
        commit();
      } else {
        end();
        if (dice_.chance(0.2)) damage();
        if (dice_.chance(0.5)) lose_nodes();
        start();
        if (dice_.chance(0.3)) roll_back();
      }
    }
    end();
    bring_back();
    start(/*plain=*/true);
    end();
    if (!fs::is_empty(fast_) && !given_up_) throw Wrong("something is left in the fast tier");
    if (fs::exists(run_ / "fast_tier.json")) throw Wrong("fast_tier.json outlives its job");
  }

 private:
  void tell(const std::string& what) const {
    if (aloud_) std::fprintf(stderr, "%s\n", what.c_str());
  }

  /// Draws a failure or a death among the next file operations.
  void draw_fault(double chance, int most_calls) {
    if (!dice_.chance(chance)) return;
    const int calls = dice_.below(most_calls);
    const bool dies = dice_.chance(0.5);
    tell("  call " + std::to_string(calls) + (dies ? " is its last" : " fails"));
    disk.arm(calls, dies, dice_.one_of({EIO, ENOSPC}));
  }
  bool died() const { return disk.hit && disk.dies; }

  /// The checkpoints in the run's folder, by index. Those rolled back are left out unless asked for.
  std::map<int, Saved> saved_checkpoints(bool rolled_back_too = false) const {
    std::map<int, Saved> all;
    const auto rollbacks = detail::checkpoint::read_rollbacks(run_);
    for (const auto& [index, path] : FolderTier(run_).list().published) {
      if (!rolled_back_too && detail::checkpoint::is_rolled_back(rollbacks, index)) continue;
      const auto manifest = detail::checkpoint::read_manifest(path);
      all[index] = {manifest.position_json.at("number"), manifest.metrics.at("score"),
                    manifest.metrics.value("checkpoint_name", "")};
    }
    return all;
  }

  void end() {
    if (!store_) return;
    if (!died()) disk.disarm();
    store_.reset();
    disk.disarm();
  }

  std::string text_of(const std::set<int>& numbers) const {
    std::string text;
    for (const int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
    return text;
  }

  /// The number of the checkpoint that the store finds; −1 if there is none.
  int newest() const {
    const auto found = store_->newest();
    if (!found) return -1;
    const auto restored = store_->read(*found);
    const int number = restored.position_json.at("number");
    if (!at::equal(restored.state.tensors.at("w"), values_of(number))) throw Wrong("the values are wrong");
    return number;
  }

  void start(bool plain = false) {
    config_ = {};
    if (!plain) {
      if (dice_.chance(0.6)) config_.num_to_keep = dice_.between(1, 3);
      if (dice_.chance(0.4)) config_.checkpoint_score_attribute = "score";
      config_.async_save = dice_.chance(0.4);
      if (dice_.chance(0.5)) config_.fast_tier = fast_;
      tell("start: keep " + std::to_string(config_.num_to_keep.value_or(0)) + " " + config_.checkpoint_score_attribute +
           (config_.async_save ? " async" : "") + (config_.fast_tier.empty() ? "" : " fast"));
      draw_fault(0.3, 60);
    }
    for (;;) {
      try {
        store_ = std::make_unique<CheckpointStore>(world_, run_, config_);
        const int found = newest();
        if (!may_be_found_.contains(found))
          throw Wrong("a start finds " + std::to_string(found) + " and not " + text_of(may_be_found_));
        may_be_found_ = {found};
        in_tier_ = false;
        tell("  finds " + std::to_string(found));
        break;
      } catch (const Error& error) {
        if (!disk.hit) throw Wrong(std::string("a start fails by itself: ") + error.what());
        tell(std::string("  ") + error.what());
      }
      end();
      disk.disarm();
    }
    if (died()) {
      end();
      return start(plain);
    }
    const bool hit = disk.hit;  // the next start removes what could not be removed
    disk.disarm();
    if (!hit) check_names();
  }

  /// Checks that the run's folder holds no unknown names.
  void check_names() const {
    for (const auto& entry : fs::directory_iterator(run_)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("checkpoint_") || name == "fast_tier.json" || name == "steps_back.json" ||
          name == "passes.json")
        continue;
      if (name == "best") continue;  // dangles if its checkpoint is damaged
      // A Store does not know about an interrupted write of the list of rollbacks. It is removed with the other
      // leftovers of the run's folder.
      if (name.starts_with("steps_back.json.tmp.") || name == ".best.naming") continue;
      throw Wrong(name + " is left behind");
    }
  }

  void commit() {
    if (!store_) return;
    const int number = ++last_number_;
    CheckpointContents contents;
    contents.state.tensors.emplace("w", values_of(number));
    contents.position_json = {{"number", number}};
    contents.metrics = {{"score", dice_.below(5)}, {"checkpoint_name", dice_.chance(0.3) ? "best" : ""}};
    const auto name = contents.metrics.at("checkpoint_name").get<std::string>();
    const bool behind = config_.async_save && dice_.chance(0.7), fast = !config_.fast_tier.empty();
    if (dice_.chance(0.3)) {
      contents.directory = run_.parent_path() / ("files" + std::to_string(number));
      fs::create_directory(*contents.directory);
      std::ofstream(*contents.directory / "notes.txt") << "of " << number;
    }
    tell("save " + std::to_string(number) + (behind ? " behind" : ""));
    const auto before = saved_checkpoints();
    draw_fault(0.5, fast ? 70 : 40);
    std::optional<Error> of_commit, of_finish;
    std::optional<Checkpoint> made;
    try {
      made = store_->commit(std::move(contents), behind ? CheckpointStore::Mode::async : CheckpointStore::Mode::sync);
      of_finish = store_->finish();
    } catch (const Error& error) {
      of_commit = error;
    }
    if (!disk.hit && (of_commit || of_finish))
      throw Wrong(std::string("a save fails by itself: ") + (of_commit ? of_commit : of_finish)->what());
    if (of_commit || of_finish) tell(std::string("  ") + (of_commit ? of_commit : of_finish)->what());
    const bool hit = disk.hit, dead = died();
    const bool known = !of_commit && (!of_finish || (fast && !behind));  // the training function knows of the save
    if (known)
      may_be_found_ = {number};
    else if (dead || (fast && behind && !of_commit))
      may_be_found_.insert(number);
    in_tier_ = in_tier_ || (fast && (of_commit || of_finish || dead));
    if (!of_commit && !of_finish && !dead) in_tier_ = false;
    may_be_given_up_ = may_be_given_up_ || hit;
    if (!of_commit && !of_finish && !hit) lost_.clear();
    if (dead) {
      end();
      return start();
    }
    disk.disarm();
    if (of_commit || of_finish) return;
    if (!name.empty()) FolderTier(run_).set_name(*FolderTier::index_of(made->path().filename()), name);
    if (const int found = newest(); found != number)
      throw Wrong("after a save of " + std::to_string(number) + " it finds " + std::to_string(found));
    if (!hit) check_retention(before);
  }

  /// Checks that the best checkpoints and the newest one are kept, and that no rolled-back one takes the place of a
  /// live one.
  void check_retention(std::map<int, Saved> before) const {
    const auto live = saved_checkpoints(), all = saved_checkpoints(true);
    const auto keep = static_cast<std::size_t>(config_.num_to_keep.value_or(1'000'000));
    const int newest = live.rbegin()->first;
    before.insert(*live.rbegin());
    if (before.size() > keep && all.size() != live.size()) throw Wrong("what is rolled back takes a place");
    std::vector<std::pair<double, int>> ranked;
    for (const auto& [index, saved] : before)
      ranked.emplace_back(config_.checkpoint_score_attribute.empty() ? 0 : saved.score, index);
    std::ranges::sort(ranked, std::greater{});
    std::set<int> expected{newest};
    for (std::size_t i = 0; i < ranked.size() && i < keep; ++i) expected.insert(ranked[i].second);
    std::set<int> have;
    for (const auto& [index, saved] : live) have.insert(index);
    if (have != expected) throw Wrong("kept are " + text_of(have) + " and not " + text_of(expected));
  }

  void roll_back() {
    const auto live = saved_checkpoints();
    if (!store_ || live.empty() || may_be_found_.size() != 1) return;
    const auto target = std::next(live.begin(), dice_.below(static_cast<int>(live.size())));
    const auto rollbacks = detail::checkpoint::read_rollbacks(run_);
    const bool done = !rollbacks.empty() && rollbacks.back().to == target->first;
    tell("roll back to " + std::to_string(target->second.number) + (done ? " again" : ""));
    if (!done && dice_.chance(0.2)) {
      store_->roll_back(target->first);
      if (newest() != target->second.number) throw Wrong("a rollback leads elsewhere");
      tell("  which is never taken up");
      end();
      return start();
    }
    draw_fault(0.3, 12);
    bool failed = false;
    try {
      store_->roll_back(target->first);
      store_->confirm_rollback();
    } catch (const Error& error) {
      if (!disk.hit) throw Wrong(std::string("a rollback fails by itself: ") + error.what());
      failed = true;
    }
    if (!failed && !done) may_be_found_ = {target->second.number};
    if (failed) may_be_found_.insert(target->second.number);
    may_be_given_up_ = may_be_given_up_ || disk.hit;
    if (!disk.hit && !done) lost_.clear();
    if (failed || died()) {
      if (!failed && !done) may_be_found_ = {target->second.number};
      end();
      return start();
    }
    disk.disarm();
    if (const int found = newest(); !may_be_found_.contains(found))
      throw Wrong("after a rollback it finds " + std::to_string(found));
    for (const auto& entry : fs::directory_iterator(run_)) {
      if (!entry.is_symlink()) continue;
      const auto index = FolderTier::index_of(fs::read_symlink(entry.path()).filename());
      if (index && saved_checkpoints(true).contains(*index) && !saved_checkpoints().contains(*index))
        throw Wrong("a name leads to what is rolled back");
    }
  }

  /// Damages the newest checkpoint in the run's folder, if there is another one to continue from.
  void damage() {
    const auto live = saved_checkpoints();
    if (in_tier_ || !lost_.empty() || live.size() < 2 || may_be_found_.size() != 1) return;
    if (!may_be_found_.contains(live.rbegin()->second.number)) return;
    tell("damage of " + std::to_string(live.rbegin()->second.number));
    {
      detail::File file(FolderTier(run_).published(live.rbegin()->first) / "state.h5", detail::File::Mode::write);
      std::byte byte{};
      const auto at = file.size() / 2;
      file.read_at({&byte, 1}, at);
      byte ^= std::byte{1};
      file.write_at({&byte, 1}, at);
    }
    may_be_found_ = {std::next(live.rbegin())->second.number};
  }

  /// Takes away the nodes with the fast tier before the next start, or brings back the nodes taken away earlier.
  void lose_nodes() {
    if (!lost_.empty() || !fs::is_empty(away_)) return bring_back();
    if (!in_tier_ || fs::is_empty(fast_)) return;
    tell("without the nodes");
    for (const auto& entry : fs::directory_iterator(fast_)) fs::rename(entry.path(), away_ / entry.path().filename());
    lost_ = may_be_found_;
    may_be_given_up_ = false;
    const auto live = saved_checkpoints();
    may_be_found_ = {live.empty() ? -1 : live.rbegin()->second.number};
  }
  void bring_back() {
    if (fs::is_empty(away_)) return;
    tell("the nodes are back");
    given_up_ = true;
    for (const auto& entry : fs::directory_iterator(away_)) fs::rename(entry.path(), fast_ / entry.path().filename());
    if (!lost_.empty()) {
      // If a later tier has a checkpoint too, either may be the newest.
      if (!in_tier_ && !may_be_given_up_) may_be_found_.clear();
      may_be_found_.insert(lost_.begin(), lost_.end());
    }
    lost_.clear();
  }

  const Communicator& world_;
  Dice dice_;
  bool aloud_;
  fs::path run_, fast_, away_;
  CheckpointConfig config_;
  std::unique_ptr<CheckpointStore> store_;
  int last_number_ = 0;
  std::set<int> may_be_found_{-1};  ///< a start must find one of these numbers
  std::set<int> lost_;              ///< numbers that a start may find once the nodes are back
  bool in_tier_ = false;            ///< a tier may hold something that the run's folder does not have
  bool may_be_given_up_ = false;    ///< a step with a failure may have given up what is lost
  bool given_up_ = false;           ///< a tier may be left on nodes that came back too late
};

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  namespace log = muster::detail::log;
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--killed") return soak::play_started_run(argc, argv);
  return soak::drive(argc, argv, "runs", [](const Communicator& world) {
    return [&world](const soak::Round& round) {
      if (world.size() > 1) return soak::validated_runs::play(round, world);
      const log::Scope as_before;
      log::configure(0, round.aloud ? log::Level::warn : log::Level::off);
      try {
        soak::Sequence(world, round).play();
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string();
    };
  });
}
