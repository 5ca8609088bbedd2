// A run drawn from a seed counts its epochs. The state it restores, the files it leaves on the disk and its rows are
// compared with a plain model. The model needs only a journal of earlier reports.
#include "soak/started_runs.hpp"

#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/rollbacks.hpp"
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "storage/folder_tier.hpp"
#include "support/file_changes.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <signal.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <compare>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

namespace fs = std::filesystem;
using detail::storage::FolderTier;

constexpr int last_start = 4;  ///< starts from this one on are not interrupted
constexpr int samples_of_an_epoch = 6;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

struct Plan {
  std::uint64_t seed = 1;
  int epochs = 1, save_every = 1, take_every = 1, name_every = 0;
  std::int64_t length = 1;  ///< length of the values; several ranks write a long one
  bool scored = false;
  ScoreOrder order = ScoreOrder::max;
  std::optional<int> keep = {};
  int second_from = 0;  ///< first start of another run, which begins from this run's checkpoints; 0: none

  bool saves(std::int64_t number) const { return number % save_every == 0; }
  bool takes(std::int64_t number) const { return number % take_every == 0; }
  bool names(std::int64_t number) const { return name_every > 0 && saves(number) && number % name_every == 0; }
};

Plan draw(std::uint64_t seed) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + 31);
  Plan plan{.seed = seed};
  plan.epochs = dice.between(3, 14);
  plan.save_every = dice.one_of({1, 1, 2, 3});
  plan.take_every = dice.between(1, 4);
  plan.name_every = dice.chance(0.5) ? dice.between(1, 4) : 0;
  plan.length = dice.one_of({10, 12'000, 12'000, 400'000});
  plan.scored = dice.chance(0.5);
  plan.order = dice.chance(0.5) ? ScoreOrder::max : ScoreOrder::min;
  if (dice.chance(0.7)) plan.keep = dice.between(1, 3);
  if (dice.chance(0.2)) plan.second_from = dice.between(2, 3);
  return plan;
}

/// How a start is interrupted.
struct Event {
  enum class Way { none, kill, kill_at_call, kill_at_time, kill_launcher, terminate, stop, raise } way = Way::none;
  std::int64_t number = 1;  ///< epoch in which it happens
  bool after = false;       ///< after the report instead of before it
  int rank = 0;             ///< modulo the number of ranks
  int calls = 0;
  std::chrono::milliseconds time{};
};

struct StartPlan {
  Event event = {};
  bool async_save = false, fast_tier = false;
  bool must_resume = false;
  double back = -1;          ///< position, from 0 to 1, of the checkpoint to roll back to; negative: no rollback
  bool catches = false;      ///< the training function catches muster's exceptions
  std::int64_t refused = 0;  ///< epoch in which a report fails before the good one; 0: none
};

StartPlan draw_start(const Plan& plan, int start) {
  Dice dice(plan.seed * 0x9e3779b97f4a7c15ULL + 1000 + static_cast<std::uint64_t>(start));
  StartPlan drawn{.async_save = dice.chance(0.4), .fast_tier = dice.chance(0.4), .must_resume = dice.chance(0.3)};
  if (dice.chance(0.25)) drawn.back = dice.real();
  Dice of_errors(plan.seed * 0x9e3779b97f4a7c15ULL + 2000 + static_cast<std::uint64_t>(start));
  drawn.catches = of_errors.chance(0.4);
  if (of_errors.chance(0.4)) drawn.refused = of_errors.between(1, plan.epochs);
  if (start >= last_start) return drawn;
  using Way = Event::Way;
  drawn.event.way = dice.one_of({Way::kill, Way::kill_at_call, Way::kill_at_call, Way::kill_at_call, Way::kill_at_time,
                                 Way::kill_launcher, Way::terminate, Way::stop, Way::stop, Way::raise});
  drawn.event.number = dice.between(1, plan.epochs);
  drawn.event.after = dice.chance(0.5);
  drawn.event.rank = dice.below(6);
  drawn.event.calls = dice.below(120);
  drawn.event.time = std::chrono::milliseconds(dice.between(300, 2000));
  return drawn;
}

at::Tensor values_of(std::int64_t number, std::int64_t length) { return at::arange(length, at::kDouble).add(number); }

int drawn_at(const Plan& plan, std::int64_t number, std::uint64_t what) {
  return Dice(plan.seed * 77 + static_cast<std::uint64_t>(number) * 5 + what).below(7);
}
int score_of(const Plan& plan, std::int64_t number) { return drawn_at(plan, number, 1); }

/// The metric over the epochs since it was last taken.
double loss_at(const Plan& plan, std::int64_t number) {
  double sum = 0;
  int count = 0;
  for (auto epoch = number; epoch > 0 && (epoch == number || !plan.takes(epoch)); --epoch, ++count)
    sum += drawn_at(plan, epoch, 2);
  return sum / count;
}

/// A file with one line per event of a run, over all its starts. One rank writes it.
class Journal {
 public:
  struct Line {
    int start;
    std::string word;
    std::int64_t number;
  };
  explicit Journal(fs::path file) : file_(std::move(file)) {}

  void add(int start, const std::string& word, std::int64_t number) const {
    std::ostringstream text;
    text << start << ' ' << word << ' ' << number << '\n';
    std::ofstream(file_, std::ios::app) << text.str();
  }
  std::vector<Line> read() const {
    std::vector<Line> lines;
    std::ifstream file(file_);
    for (Line line; file >> line.start >> line.word >> line.number;) lines.push_back(line);
    return lines;
  }

 private:
  fs::path file_;
};

/// Bounds for the number of the newest checkpoint.
struct Bounds {
  std::int64_t least = 0, most = 0;

  static Bounds of(const std::vector<Journal::Line>& lines) {
    Bounds bounds;
    std::int64_t behind = 0;  // a save that may still be under way
    for (const auto& [start, word, number] : lines) {
      if (word == "from") bounds = {number, number}, behind = 0;
      if (word == "back") bounds.least = std::min(bounds.least, number), behind = 0;
      if (word == "epoch") bounds.most = number;
      if (word == "saved") bounds.least = number;
      if (word == "saving") bounds.least = std::max(bounds.least, std::exchange(behind, number));
      if (word == "ended") bounds.least = std::max(bounds.least, number);
    }
    return bounds;
  }
};

/// Tells checkpoints apart. A stop may save again what a report has saved, without the report's metrics.
struct CheckpointId {
  std::int64_t number = 0;
  bool of_stop = false;
  auto operator<=>(const CheckpointId&) const = default;
};

/// The folders of the checkpoints on the disk that no rollback has given up. The numbers rise with the index.
using Checkpoints = std::map<CheckpointId, fs::path>;

Checkpoints live_in(const fs::path& run) {
  Checkpoints live;
  if (!fs::exists(run)) return live;
  const auto rollbacks = detail::checkpoint::read_rollbacks(run);
  for (const auto& [index, path] : FolderTier(run).list().published) {
    if (detail::checkpoint::is_rolled_back(rollbacks, index)) continue;
    std::int64_t number = 0;
    Checkpoint::from_directory(path).load("number", number);
    const CheckpointId id{number, !detail::checkpoint::read_manifest(path).metrics.contains("score")};
    require(live.empty() || live.rbegin()->first < id, "checkpoints are not in the order of their numbers");
    live[id] = path;
  }
  return live;
}

/// The file may also hold the exit code of a run that has ended meanwhile.
void note_kill(const std::string& file) { std::ofstream(file + ".ending", std::ios::app) << "kill\n"; }

/// Kills this process at a drawn change of the run's files.
class CallCounter final : public test::FileWatcher {
 public:
  CallCounter(std::string folder, int calls, std::function<void()> kill)
      : folder_(std::move(folder)), left_(calls), kill_(std::move(kill)) {
    test::watch_files(this);
  }
  ~CallCounter() override { test::watch_files(nullptr); }
  bool before(const test::FileChange& change) override {
    if (change.path.starts_with(folder_) && left_-- == 0) kill_();
    return true;
  }

 private:
  std::string folder_;
  std::atomic<int> left_;
  std::function<void()> kill_;
};

class StartedRun {
 public:
  StartedRun(Launch& launch, const Plan& plan, StartPlan drawn, int start, std::optional<CheckpointId> back,
             Bounds seed, std::string file)
      : launch_(launch),
        plan_(plan),
        drawn_(std::move(drawn)),
        start_(start),
        back_(back),
        seed_(seed),
        file_(std::move(file)),
        storage_(*launch.flags().storage),
        folder_(storage_ / *launch.flags().name),
        journal_(storage_ / ("journal." + *launch.flags().name)),
        before_(launch.rank() == 0 ? live_in(folder_) : Checkpoints()) {}

  Result run() {
    const auto fast = drawn_.fast_tier ? storage_ / "fast" : fs::path();
    if (drawn_.fast_tier) fs::create_directories(fast);
    if (launch_.rank() == 0 && back_) journal_.add(start_, "back", back_->number);
    std::optional<CallCounter> counter;
    const auto& event = drawn_.event;
    if (event.way == Event::Way::kill_at_call && event.rank % launch_.size() == launch_.rank())
      counter.emplace(storage_.string() + '/', event.calls, [&] { kill(SIGKILL); });
    // The settings differ in each start; otherwise a finished run would not continue after a rollback.
    auto result =
        TorchTrainer(launch_,
                     [&](Session& session) {
                       try {
                         record_errors([&] { train(session); });
                       } catch (const Error&) {
                         if (!drawn_.catches) throw;
                       }
                     },
                     {.train_loop_config = {{"start", start_}},
                      .run_config = {.checkpoint_config = {.num_to_keep = plan_.keep,
                                                           .checkpoint_score_attribute = plan_.scored ? "score" : "",
                                                           .checkpoint_score_order = plan_.order,
                                                           .async_save = drawn_.async_save,
                                                           .fast_tier = fast}}})
            .fit();
    counter.reset();
    if (launch_.rank() == 0) record_errors([&] { check(result); });
    return result;
  }

 private:
  void note(const Session& session, const char* word, std::int64_t number) const {
    if (session.world_rank() == 0) journal_.add(start_, word, number);
  }

  /// Writes an error to a file, since it is lost if mpirun was killed.
  void record_errors(const std::function<void()>& call) const {
    try {
      call();
    } catch (const std::logic_error& wrong) {
      std::ofstream(file_ + ".wrong", std::ios::app) << wrong.what() << '\n';
      throw;
    }
  }

  void kill(int signal) const {
    note_kill(file_);
    ::kill(::getpid(), signal);
    if (signal == SIGKILL) ::pause();
  }

  void apply_event(const Session& session, std::int64_t number, bool after) const {
    const auto& event = drawn_.event;
    if (event.number != number || event.after != after) return;
    if (event.rank % session.world_size() != session.world_rank()) return;
    using Way = Event::Way;
    if (event.way == Way::kill) kill(SIGKILL);
    if (event.way == Way::terminate) kill(SIGTERM);
    if (event.way == Way::kill_launcher) {
      note_kill(file_);
      ::kill(::getppid(), SIGKILL);
    }
    if (event.way == Way::stop) {
      journal_.add(start_, "stop", number);
      ::raise(SIGUSR1);
    }
    if (event.way == Way::raise) {
      journal_.add(start_, "raise", number);
      throw std::runtime_error("thrown in epoch " + std::to_string(number));
    }
  }

  void train(Session& session) {
    std::int64_t number = 0;
    auto values = values_of(0, plan_.length);
    Mean loss;
    auto state = session.state({{"number", number}, {"values", values}, {"loss", loss}});
    const bool from_other_run = begins_from_other_run(session);
    const auto own_bounds = Bounds::of(journal_.read());
    require(!from_other_run || own_bounds.least == base(), "it has a checkpoint and begins from another run");
    const auto bounds = from_other_run ? seed_ : own_bounds;
    session.barrier();
    state.restore();
    require(at::equal(values, values_of(number, plan_.length)), "the values are not those of their number");
    require(!back_ || number == back_->number, "it steps back to " + std::to_string(number));
    require(back_ || (number >= bounds.least && number <= bounds.most),
            "it goes on from " + std::to_string(number) + " and not between " + std::to_string(bounds.least) + " and " +
                std::to_string(bounds.most));
    if (from_other_run) note(session, "base", number);
    note(session, "from", number);
    session.barrier();
    for (const auto epoch : session.epochs(plan_.epochs)) {
      require(epoch == number, "epoch " + std::to_string(epoch) + " begins after " + std::to_string(number));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++number;
      note(session, "epoch", number);
      values.copy_(values_of(number, plan_.length));
      loss.add(drawn_at(plan_, number, 2), samples_of_an_epoch / session.world_size());
      apply_event(session, number, false);
      const Metrics metrics{
          {"number", number}, {"score", score_of(plan_, number)}, {"loss", plan_.takes(number) ? loss.take() : loss}};
      if (drawn_.refused == number) be_refused(session, metrics);
      if (plan_.saves(number))
        session.report(metrics, state, {.checkpoint_name = plan_.names(number) ? "best" : ""});
      else
        session.report(metrics);
      if (plan_.saves(number)) note(session, drawn_.async_save ? "saving" : "saved", number);
      apply_event(session, number, true);
    }
  }

  /// Makes a report that fails. Nothing of it may count.
  void be_refused(Session& session, const Metrics& metrics) const {
    const StateEntry refusing([]() -> StateDict { throw std::runtime_error("refused"); }, [](const StateDict&) {});
    auto state = session.state({{"refusing", refusing}});
    bool is_made = false;
    try {
      session.report(metrics, state);
      is_made = true;
    } catch (const Error&) {
    }
    require(!is_made, "a report whose state cannot be saved is made");
  }

  bool begins_from_other_run(const Session& session) const {
    const auto checkpoint = session.get_checkpoint();
    return checkpoint && !fs::equivalent(checkpoint->path().parent_path(), folder_);
  }
  /// The number with which the run began: 0, or the number that it found in another run.
  std::int64_t base() const {
    std::int64_t base = 0;
    for (const auto& line : journal_.read())
      if (line.word == "base") base = line.number;
    return base;
  }

  // --- After a start that was not killed, on one rank ---

  void check(const Result& result) {
    const auto lines = journal_.read();
    const auto has = [&](const char* word) {
      return std::ranges::any_of(lines, [&](const auto& line) { return line.start == start_ && line.word == word; });
    };
    const int code = static_cast<int>(result.exit_code());
    if (has("raise"))
      require(code == 1, "it has thrown, and ends with " + std::to_string(code));
    else
      require(code == 0 || (has("stop") && code == 85), "it ends with " + std::to_string(code));
    std::ofstream(file_ + ".ending", std::ios::app) << code << '\n';

    const auto live = live_in(folder_);
    const auto newest = live.empty() ? base() : live.rbegin()->first.number;
    const auto bounds = Bounds::of(lines);
    require(newest >= bounds.least && newest <= bounds.most, "the newest is " + std::to_string(newest));
    std::int64_t last_saved = 0, reported = 0;
    for (const auto& line : lines) {
      if (line.word == "from") reported = last_saved = line.number;
      if (line.word == "saved" || line.word == "saving") last_saved = line.number;
      if (line.word == "epoch") reported = std::max(reported, line.number - 1);
    }
    if (code == 0 || code == 85) {
      require(newest >= last_saved,
              std::to_string(last_saved) + " was saved, and the newest is " + std::to_string(newest));
      journal_.add(start_, "ended", newest);
      require(!fs::exists(folder_ / "fast_tier.json"), "fast_tier.json outlives its job");
      check_fast_tier();
      for (const auto& entry : fs::directory_iterator(folder_))
        require(!entry.path().filename().string().starts_with(".checkpoint_"), entry.path().string() + " is left");
    }
    check_retention(live, newest > Bounds::of(lines_before_this_start(lines)).most || has("saved") || has("saving"));
    check_rows(result, live, code == 0 ? plan_.epochs : std::max(reported, newest));
    if (plan_.name_every > 0 && (code == 0 || code == 85)) check_name(lines, live);
    if (code == 0) std::ofstream(file_ + ".compared") << newest << '\n';
  }

  std::vector<Journal::Line> lines_before_this_start(std::vector<Journal::Line> lines) const {
    std::erase_if(lines, [&](const auto& line) { return line.start >= start_; });
    return lines;
  }

  /// Checks that leftovers in the fast tier belong to another run, which was killed and is continued by this one.
  void check_fast_tier() const {
    std::string noted;
    for (const auto& entry : fs::directory_iterator(storage_))
      if (std::ifstream note(entry.path() / "fast_tier.json"); note)
        noted.append(std::istreambuf_iterator<char>(note), std::istreambuf_iterator<char>());
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(storage_ / "fast", none)) {
      const auto name = entry.path().filename().string();  // muster-ID-NODE-HOST
      const auto id = name.substr(0, name.find('-', std::string_view("muster-").size()));
      require(noted.find(id.substr(id.find('-') + 1)) != std::string::npos, name + " is left in the fast tier");
    }
  }

  /// Checks that the newest checkpoint and the best of the earlier and new ones are kept.
  void check_retention(const Checkpoints& live, bool has_saved) const {
    if (!plan_.keep || !has_saved || live.empty()) return;
    auto all = before_;
    if (back_) all.erase(all.upper_bound(*back_), all.end());
    for (const auto& line : journal_.read()) {
      const bool taken_from_fast_tier = line.word == "from" && line.number > std::max(base(), newest_of(before_));
      if (line.start == start_ && (line.word == "saved" || line.word == "saving" || taken_from_fast_tier))
        all.try_emplace({line.number, false});
    }
    all.insert(live.begin(), live.end());
    std::vector<std::pair<std::pair<bool, int>, CheckpointId>> ranked;
    for (const auto& [id, path] : all) {
      const bool counts = plan_.scored && !id.of_stop;
      const int score = plan_.order == ScoreOrder::max ? score_of(plan_, id.number) : -score_of(plan_, id.number);
      ranked.push_back({{counts, counts ? score : 0}, id});
    }
    std::ranges::sort(ranked, std::greater{});
    std::set<CheckpointId> expected{all.rbegin()->first}, have;
    for (std::size_t i = 0; i < ranked.size() && i < static_cast<std::size_t>(*plan_.keep); ++i)
      expected.insert(ranked[i].second);
    for (const auto& [id, path] : live) have.insert(id);
    const auto text_of = [](const std::set<CheckpointId>& ids) {
      std::string text;
      for (const auto& id : ids) text += ' ' + std::to_string(id.number) + (id.of_stop ? "s" : "");
      return text;
    };
    require(have == expected, "kept are" + text_of(have) + " and not" + text_of(expected));
  }

  static std::int64_t newest_of(const Checkpoints& live) { return live.empty() ? 0 : live.rbegin()->first.number; }

  void check_rows(const Result& result, const Checkpoints& live, std::int64_t last) const {
    std::int64_t number = base();
    for (const auto& row : result.metrics_history) {
      ++number;
      const auto text = "row " + std::to_string(number) + " is " + row.dump();
      require(row.at("number") == number && row.at("training_iteration") == number - base(), text);
      require(row.at("score") == score_of(plan_, number), text);
      require(std::abs(row.at("loss").get<double>() - loss_at(plan_, number)) < 1e-12,
              text + ", not " + std::to_string(loss_at(plan_, number)));
      require(row.at("time_this_iter_s") >= 0, text + ", with a negative time");
      const auto saved = live.find({number, false});
      if (saved == live.end()) continue;
      require(row.value("checkpoint_dir_name", "") == saved->second.filename(), text);
    }
    require(number >= last && number <= last + 1,
            "there are rows up to " + std::to_string(number) + " of " + std::to_string(last));
    require(result.metrics_history.empty() ? result.metrics.is_null() : result.metrics == result.metrics_history.back(),
            "its metrics are not its last row");
    std::ifstream json(folder_ / "result.json"), csv(folder_ / "progress.csv");
    std::vector<Json> rows;
    for (std::string line; std::getline(json, line);) rows.push_back(Json::parse(line));
    require(rows == result.metrics_history, "result.json has other rows");
    std::size_t lines = 0;
    for (std::string line; std::getline(csv, line);) ++lines;
    require(lines == (rows.empty() ? 0 : rows.size() + 1), "progress.csv has " + std::to_string(lines) + " lines");
  }

  /// Checks that RUN/best leads to the last checkpoint with that name, if it still exists.
  void check_name(const std::vector<Journal::Line>& lines, const Checkpoints& live) const {
    std::int64_t named = 0;
    for (const auto& line : lines) {
      if (line.word == "back") return;
      if ((line.word == "saved" || line.word == "saving") && plan_.names(line.number)) named = line.number;
    }
    // If a start ended inside a report, the report wrote no line after it.
    for (const auto& [id, path] : live)
      if (!id.of_stop && plan_.names(id.number)) named = std::max(named, id.number);
    const auto found = live.find({named, false});
    if (found == live.end()) return;
    std::error_code none;
    const auto leads = fs::read_symlink(folder_ / "best", none).filename();
    require(leads == found->second.filename(), "best leads to " + leads.string());
  }

  Launch& launch_;
  const Plan& plan_;
  const StartPlan drawn_;
  const int start_;  ///< number of this start, from 1
  const std::optional<CheckpointId> back_;
  const Bounds seed_;  ///< of the run from which this one begins
  const std::string file_;
  const fs::path storage_, folder_;
  const Journal journal_;
  const Checkpoints before_;
};

/// The value of a flag on the command line.
std::string* value_of(std::vector<std::string>& words, const std::string& flag) {
  const auto found = std::ranges::find(words, flag);
  return found == words.end() || std::next(found) == words.end() ? nullptr : &*std::next(found);
}

}  // namespace

int play_started_run(int argc, char** argv) {
  std::vector<std::string> words(argv, argv + argc);
  const auto seed = std::stoull(*value_of(words, "--killed"));
  const int start = std::stoi(*value_of(words, "--start"));
  const auto file = *value_of(words, "--ending");
  const fs::path storage = *value_of(words, "--storage");
  const auto first_name = *value_of(words, "--name");
  std::ofstream(file + ".pids", std::ios::app) << std::to_string(::getpid()) + '\n';
  const auto plan = draw(seed);
  const auto drawn = draw_start(plan, start);
  // All of this is read before the launch; no file changes until all ranks have started.
  Bounds of_first;
  if (plan.second_from > 0 && start >= plan.second_from) {
    auto bounds = Bounds::of(Journal(storage / ("journal." + first_name)).read());
    // Another run finds only what is in the first one's folder.
    if (const FolderTier first(storage / first_name); bounds.least > 0 && detail::checkpoint::may_hold_newer(first)) {
      const auto live_in_first = live_in(first.folder());
      bounds.least = bounds.most = live_in_first.empty() ? 0 : live_in_first.rbegin()->first.number;
    }
    if (bounds.least > 0) {
      of_first = bounds;
      *value_of(words, "--name") = "second";
    }
  }
  const auto run = storage / *value_of(words, "--name");
  const auto live = live_in(run);
  std::optional<CheckpointId> back;
  if (!live.empty() && drawn.back >= 0) {
    const auto target = std::next(live.begin(), static_cast<int>(drawn.back * static_cast<double>(live.size())));
    // Roll back only once: the same job may be started again with the same command line.
    const auto rollbacks = detail::checkpoint::read_rollbacks(run);
    if (rollbacks.empty() || rollbacks.back().to != FolderTier::index_of(target->second.filename().string()))
      back = target->first;
    words.insert(words.end(), {"--resume", target->second.string()});
  } else if (of_first.most > 0) {
    words.insert(words.end(), {"--resume", (storage / first_name).string()});
  } else if (!live.empty() && drawn.must_resume) {
    words.insert(words.end(), {"--resume", "must"});
  }
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const char* const size = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (drawn.event.way == Event::Way::kill_at_time && rank != nullptr && size != nullptr &&
      drawn.event.rank % std::atoi(size) == std::atoi(rank))
    std::thread([file, time = drawn.event.time] {
      std::this_thread::sleep_for(time);
      note_kill(file);
      ::kill(::getpid(), SIGKILL);
    }).detach();

  std::vector<char*> arguments;
  for (auto& word : words) arguments.push_back(word.data());
  Launch launch(static_cast<int>(arguments.size()), arguments.data());
  std::string unused;
  for (const char* option : {"--killed", "--start", "--ending"}) launch.app().add_option(option, unused);
  return launch.run([&] { return StartedRun(launch, plan, drawn, start, back, of_first, file).run(); });
}

}  // namespace muster::soak
