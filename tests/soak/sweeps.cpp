// Plays random sweeps: they have random spaces, schedulers and groups of ranks, and their trials throw, are stopped or
// lose their ranks, over several starts on different numbers of ranks. After each start, the files are compared with a
// plain model, in which the rows of a trial are a function of its settings.
//   mpirun -n RANKS sweeps --first SEED --count SWEEPS
//   mpirun -n RANKS sweeps --seed SEED                       one sweep, printed start by start
//   mpirun -n RANKS sweeps --killed SEED --start N --ending FILE --name NAME --storage FOLDER
// The last form is one start of a sweep in which ranks also kill themselves. FILE.ending holds "kill" if one did,
// otherwise the expected exit code of the start. FILE.compared exists once nothing is left to do. Ends with 1 if
// anything differs, and prints the command that repeats the sweep.
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "sweep/asha.hpp"
#include "sweep/space.hpp"

#include <signal.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
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

/// Starts from this one on are not interrupted.
constexpr int last_start = 4;
/// A trial that kills its ranks in every start is given up within this many starts.
constexpr int most_starts = 9;
constexpr std::uint64_t sweep_seed = 3;
constexpr const char* names[] = {"a", "b.c", "b.d", "e"};

/// Thrown if something is wrong.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void require(bool holds, const std::string& what) {
  if (!holds) throw Wrong(what);
}

Dice dice_of(std::uint64_t seed, int what) {
  return Dice(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(what));
}

/// What a trial does, by its number.
struct Behaviour {
  int reports = 1;
  int save_every = 1;  ///< in reports: distance between reports with a state; 0: no state
  bool has_metric = true;
  int metric_every = 1;       ///< in reports: distance between reports with the metric, from the first one on
  int nan_at = 0;             ///< the report whose metric is NaN; 0: none
  int throws_at = 0;          ///< throws before this report, in every attempt; 0: never
  bool always_kills = false;  ///< kills its ranks before its next report, in every start

  bool has_metric_at(int report) const { return has_metric && (report - 1) % metric_every == 0; }
};

struct Plan {
  std::uint64_t seed = 1;
  Space space = {};
  Config defaults = {{"other", "kept"}};
  int num_samples = 1;
  int later_samples = 0;  ///< samples added in the second start
  ScoreOrder mode = ScoreOrder::max;
  std::optional<Asha> scheduler = {};
  bool own_trainable = false, async_save = false, trains = false;
  std::optional<int> keep = {};
  int retries = 0;
  std::vector<Behaviour> trials = {};

  int samples(int start) const { return num_samples + (start > 1 ? later_samples : 0); }
  int last_report(const Behaviour& trial) const {
    return scheduler ? std::min(trial.reports, static_cast<int>(scheduler->max_t)) : trial.reports;
  }
};

void set(Json& settings, const std::string& name, const Json& value) {
  const auto dot = name.find('.');
  if (dot == name.npos)
    settings[name] = value;
  else
    settings[name.substr(0, dot)][name.substr(dot + 1)] = value;
}
Json get(const Json& settings, const std::string& name) {
  const auto dot = name.find('.');
  return dot == name.npos ? settings.at(name) : settings.at(name.substr(0, dot)).at(name.substr(dot + 1));
}

/// `killed`: some trials may kill their ranks in every start.
Plan draw(std::uint64_t seed, bool killed) {
  auto dice = dice_of(seed, 23);
  Plan plan{.seed = seed};
  int trials = 1;
  for (const char* name : names) {
    if (!dice.chance(0.45)) continue;
    const int kind = dice.below(6);
    if (kind == 0) {
      plan.space.emplace_back(name, uniform(-1, 2));
      set(plan.defaults, name, 0.5);
    } else if (kind == 1) {
      plan.space.emplace_back(name, log_uniform(1e-4, dice.chance(0.8) ? 1e-1 : std::nextafter(1e-4, 1.0)));
      set(plan.defaults, name, 0.5);
    } else if (kind == 2) {
      plan.space.emplace_back(name, randint(-3, dice.between(-2, 40)));
      set(plan.defaults, name, 1);
    } else if (kind == 3) {
      plan.space.emplace_back(name, choice({"x", "y", "ü"}));
      set(plan.defaults, name, "z");
    } else {
      std::vector<Json> values;
      for (int i = dice.between(1, 3); i > 0 && (static_cast<int>(values.size()) + 1) * trials <= 6; --i)
        values.push_back(dice.below(9));
      if (values.empty()) values.push_back(7);
      trials *= static_cast<int>(values.size());
      plan.space.emplace_back(name, grid(values));
      set(plan.defaults, name, 1);
    }
  }
  plan.num_samples = dice.between(1, std::max(1, 7 / trials));
  plan.later_samples = trials <= 3 && dice.chance(0.2) ? 1 : 0;
  plan.mode = dice.chance(0.5) ? ScoreOrder::max : ScoreOrder::min;
  if (dice.chance(0.5)) {
    plan.scheduler = Asha{.grace_period = dice.between(1, 2), .reduction_factor = dice.between(2, 3)};
    plan.scheduler->max_t = dice.between(2, 9);
  }
  plan.own_trainable = dice.chance(0.3);
  plan.async_save = dice.chance(0.3);
  plan.trains = dice.chance(0.3);
  if (dice.chance(0.5)) plan.keep = dice.between(1, 2);
  plan.retries = dice.chance(0.3) ? 1 : 0;
  const bool metric_everywhere = killed || dice.chance(0.8), metric_sometimes = dice.chance(0.4);
  for (int i = trials * (plan.num_samples + plan.later_samples); i > 0; --i) {
    Behaviour trial{.reports = dice.between(1, 9)};
    trial.save_every = dice.one_of({0, 1, 1, 1, 2, 3});
    trial.has_metric = metric_everywhere || dice.chance(0.5);
    if (metric_sometimes) trial.metric_every = dice.between(1, 3);
    if (dice.chance(0.1)) trial.nan_at = dice.between(1, trial.reports);
    if (dice.chance(0.1)) trial.throws_at = dice.between(1, trial.reports);
    plan.trials.push_back(trial);
  }
  if (killed && dice.chance(0.2))
    plan.trials[static_cast<std::size_t>(dice.below(static_cast<int>(plan.trials.size())))].always_kills = true;
  return plan;
}

/// An interruption of a trial, in the first attempt of a start.
struct Event {
  enum class Way { raise, raise_everywhere, stop, stop_file, kill, terminate } way = Way::raise;
  int trial = 0, report = 1;
  bool after = false;  ///< after the report instead of before it
  int rank = 0;        ///< modulo the number of ranks of the trial

  bool throws() const { return way == Way::raise || way == Way::raise_everywhere; }
  bool kills() const { return way == Way::kill || way == Way::terminate; }
};

struct StartPlan {
  int ranks = 1, ranks_per_trial = 1;
  std::vector<Event> events = {};
  bool has_time = true;  ///< otherwise the start is stopped before anything begins

  int groups() const { return ranks / ranks_per_trial; }
};

StartPlan draw_start(const Plan& plan, int start, int ranks, bool killed) {
  auto dice = dice_of(plan.seed, 100 + start);
  StartPlan drawn{.ranks = ranks, .ranks_per_trial = dice.between(1, ranks)};
  if (start >= last_start) return drawn;
  drawn.has_time = killed || dice.chance(0.9);
  using Way = Event::Way;
  for (int i = dice.below(3); i > 0; --i) {
    Event event{.trial = dice.below(static_cast<int>(plan.trials.size()))};
    event.way = killed
                    ? dice.one_of({Way::raise, Way::stop, Way::stop, Way::kill, Way::kill, Way::kill, Way::terminate})
                    : dice.one_of({Way::raise, Way::raise, Way::raise_everywhere, Way::stop_file});
    event.report = dice.between(1, plan.trials[static_cast<std::size_t>(event.trial)].reports);
    event.after = dice.chance(0.4);
    event.rank = dice.below(12);
    drawn.events.push_back(event);
  }
  return drawn;
}

/// A trial's score at a report: a whole number, so that the mean over ranks is exact.
int score_of(const Json& config, int report) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const unsigned char c : config.dump() + '#' + std::to_string(report)) hash = (hash ^ c) * 0x100000001b3ULL;
  return static_cast<int>((hash >> 20) % 41);
}

/// A file in which the trials note their events, over all starts.
class Journal {
 public:
  struct Line {
    int start, trial;
    std::string word;
    int report;
  };
  explicit Journal(fs::path file) : file_(std::move(file)) {}

  void add(const Line& line) const {
    std::ostringstream text;
    text << line.start << ' ' << line.trial << ' ' << line.word << ' ' << line.report << '\n';
    std::ofstream(file_, std::ios::app) << text.str();
  }
  std::vector<Line> read() const {
    std::vector<Line> lines;
    std::ifstream file(file_);
    for (Line line; file >> line.start >> line.trial >> line.word >> line.report;) lines.push_back(line);
    return lines;
  }

 private:
  fs::path file_;
};

Json json_in(const fs::path& file) {
  std::ifstream in(file);
  return Json::parse(in);
}

/// One start of a sweep, on the ranks of a launch.
class Start {
 public:
  Start(Launch& launch, const Plan& plan, int start, StartPlan drawn, fs::path ending, std::uint64_t seed)
      : launch_(launch),
        plan_(plan),
        start_(start),
        drawn_(std::move(drawn)),
        folder_(*launch.flags().storage / *launch.flags().name),
        ending_(std::move(ending)),
        journal_(*launch.flags().storage / "journal"),
        points_(detail::sweep::sample_space(plan.space, plan.samples(start), seed)) {}

  /// Runs the sweep, checks its result and returns it. Collective.
  SweepResult run() {
    const auto before = finished_trials();
    const TorchTrainerOptions options{
        .train_loop_config = plan_.defaults,
        .run_config = {.checkpoint_config = {.num_to_keep = plan_.keep, .async_save = plan_.async_save},
                       .failure_config = {.max_failures = plan_.retries}}};
    const auto train_trial = [&](Session& session, const Config& config) { train(session, config); };
    TorchTrainer trainer(launch_, train_trial, options);
    const Trainable own = [&](Launch& part, const Config& config) {
      auto theirs = options;
      theirs.train_loop_config.merge_patch(config);
      return TorchTrainer(part, train_trial, theirs).fit();
    };
    auto result = Sweep(launch_, plan_.own_trainable ? own : trainer.as_trainable(),
                        {.space = plan_.space,
                         .num_samples = plan_.samples(start_),
                         .ranks_per_trial = drawn_.ranks_per_trial,
                         .metric = "score",
                         .mode = plan_.mode,
                         .scheduler = plan_.scheduler})
                      .fit();
    const auto everywhere = launch_.communicator().all_gather(text_of(result));
    for (const auto& theirs : everywhere) require(theirs == everywhere.front(), "the ranks have different results");
    if (launch_.rank() == 0) check(result, before);
    return result;
  }

  /// The exit code that the program must end with.
  static ExitCode expected_code(const SweepResult& result) {
    const auto& trials = result.trials;
    const bool ended = std::ranges::any_of(trials, has_ended);
    if (std::ranges::count(trials, TrialStatus::waiting, &Trial::status) > 0) {
      const bool saved = std::ranges::any_of(trials, [](const Trial& trial) { return trial.checkpoint.has_value(); });
      return ended || saved ? ExitCode::stopped : ExitCode::retry;
    }
    if (!ended) return trials.front().error->code();
    const auto has_metric = [](const Trial& trial) {
      return trial.metrics.contains("score") && trial.metrics.at("score").is_number();
    };
    return std::ranges::any_of(trials, has_metric) ? ExitCode::done : ExitCode::usage;
  }

  /// True if no later start can change the result.
  bool is_over(const SweepResult& result) const {
    const auto& trials = result.trials;
    if (std::ranges::count(trials, TrialStatus::waiting, &Trial::status) > 0) return false;
    return start_ >= last_start ||
           (plan_.samples(start_) == plan_.samples(2) && std::ranges::all_of(trials, has_ended));
  }

 private:
  static bool has_ended(const Trial& trial) {
    return trial.status == TrialStatus::done || trial.status == TrialStatus::stopped;
  }

  static std::string text_of(const SweepResult& result) {
    Json text = Json::array();
    for (const auto& trial : result.trials)
      text.push_back({trial.name, trial.config, static_cast<int>(trial.status), trial.metrics,
                      trial.checkpoint ? trial.checkpoint->path().string() : "",
                      trial.error ? trial.error->what() : ""});
    return text.dump();
  }

  /// On rank 0: trial.json of each trial that has ended well, by the trial's name.
  std::map<std::string, Json> finished_trials() const {
    std::map<std::string, Json> rows;
    if (launch_.rank() != 0 || !fs::exists(folder_)) return rows;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (!fs::exists(entry.path() / "trial.json")) continue;
      const auto row = json_in(entry.path() / "trial.json");
      const auto status = row.at("status").get<std::string>();
      if (status == "done" || status.starts_with("stopped")) rows[row.at("trial")] = row;
    }
    return rows;
  }

  // --- In a trial ---

  void train(Session& session, const Config& config) {
    const int number = std::stoi(session.trial_name().substr(6));
    const auto& trial = plan_.trials.at(static_cast<std::size_t>(number));
    const auto note = [&](const char* word, int report) {
      if (session.world_rank() == 0) journal_.add({start_, number, word, report});
    };
    require(session.world_size() == drawn_.ranks_per_trial, "a trial is on other ranks than it asked for");
    require(config == settings_of(number), "a trial is given " + config.dump());
    std::int64_t done = 0, sum = 0;
    auto state = session.state({{"done", done}, {"sum", sum}});
    state.restore();
    std::int64_t expected = 0;
    for (int report = 1; report <= done; ++report) expected += score_of(config, report);
    require(sum == expected, "a trial has restored another state");
    const int attempt = ++attempts_[number];
    note("begin", static_cast<int>(done));
    session.barrier();
    if (plan_.trains) take_step(session);
    while (done < trial.reports) {
      const int report = static_cast<int>(done) + 1;
      if (trial.always_kills) kill(number, report, SIGKILL);
      apply_events(session, number, report, attempt, false);
      if (trial.throws_at == report) {
        note("throw", report);
        throw std::runtime_error("thrown by trial " + std::to_string(number));
      }
      done = report;
      const int score = score_of(config, report);
      sum += score;
      Metrics metrics{{"sum", sum}};
      if (trial.has_metric_at(report)) metrics.emplace("score", trial.nan_at == report ? std::nan("") : score);
      const bool saves = trial.save_every > 0 && report % trial.save_every == 0;
      saves ? session.report(metrics, state) : session.report(metrics);
      note("reported", report);
      if (saves && !plan_.async_save) note("saved", report);
      apply_events(session, number, report, attempt, true);
    }
  }

  /// Checks that gradients are averaged over the ranks of the trial only.
  void take_step(Session& session) const {
    auto net = session.prepare_model(torch::nn::Linear(3, 1));
    net->forward(at::full({1, 3}, session.world_rank() + 1.0)).sum().backward();
    const auto mean = net->weight.grad()[0][0].item<double>();
    require(std::abs(mean - (session.world_size() + 1) / 2.0) < 1e-6, "a gradient is " + std::to_string(mean));
  }

  void kill(int number, int report, int signal) {
    journal_.add({start_, number, "kill", report});
    std::ofstream(ending_.string() + ".ending") << "kill\n";
    ::raise(signal);
  }

  void apply_events(Session& session, int number, int report, int attempt, bool after) {
    for (const auto& event : drawn_.events) {
      if (event.trial != number || event.report != report || event.after != after || attempt > 1) continue;
      const bool here = event.rank % session.world_size() == session.world_rank();
      using Way = Event::Way;
      if (event.way == Way::raise_everywhere || (event.way == Way::raise && here)) {
        journal_.add({start_, number, "throw", report});
        throw std::runtime_error("thrown by trial " + std::to_string(number));
      }
      if (event.throws()) continue;
      if (event.kills()) {
        if (here) kill(number, report, event.way == Way::kill ? SIGKILL : SIGTERM);
        continue;
      }
      if (here) {
        journal_.add({start_, number, "stop", report});
        if (event.way == Way::stop_file) std::ofstream(folder_ / "stop") << '\n';
        if (event.way == Way::stop) ::raise(SIGUSR1);
      }
      while (!session.should_stop()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  /// The program's defaults, overridden by the trial's settings.
  Json settings_of(int number) const {
    auto settings = plan_.defaults;
    settings.merge_patch(points_.at(static_cast<std::size_t>(number)).config);
    return settings;
  }

  // --- After a start, on rank 0 ---

  void check(const SweepResult& result, const std::map<std::string, Json>& before) const {
    check_space();
    require(result.trials.size() == plan_.trials.size() || start_ == 1, "trials are missing");
    require(result.trials.size() == points_.size(), "there are other trials than points");
    const auto lines = journal_.read();
    const bool stops =
        !drawn_.has_time || std::ranges::any_of(lines, [&](const auto& line) { return is(line, start_, "stop"); });
    for (int number = 0; const auto& trial : result.trials) {
      try {
        check(trial, number, before, lines, stops);
      } catch (const Wrong& wrong) {
        throw Wrong(trial.name + ": " + wrong.what() + " (" + std::to_string(static_cast<int>(trial.status)) + ", " +
                    trial.metrics.dump() + (trial.error ? std::string(", ") + trial.error->what() : "") + ")");
      }
      ++number;
    }
    check_best(result);
    check_tables(result);
    if (drawn_.groups() == 1 && start_ == 1 && !stops) check_decisions(result);
  }

  static bool is(const Journal::Line& line, int start, std::string_view word) {
    return line.start == start && line.word == word;
  }

  void check_space() const {
    int trials = 1;
    for (const auto& [name, domain] : plan_.space)
      if (domain.kind() == Domain::Kind::grid) trials *= static_cast<int>(domain.values().size());
    require(static_cast<int>(points_.size()) == trials * plan_.samples(start_), "the space has another size");
    for (int number = 0; const auto& point : points_) {
      int left = number % trials, rest = trials;
      for (const auto& [name, domain] : plan_.space) {
        const auto value = get(point.config, name);
        const auto& values = domain.values();
        if (domain.kind() == Domain::Kind::grid) {
          rest /= static_cast<int>(values.size());
          require(value == values[static_cast<std::size_t>(left / rest)], name + " is another one of its grid");
          left %= rest;
        } else if (domain.kind() == Domain::Kind::choice) {
          require(std::ranges::count(values, value) == 1, name + " is none of the choice");
        } else {
          require(value >= values[0] &&
                      (domain.kind() == Domain::Kind::log_uniform ? value <= values[1] : value < values[1]),
                  name + " is out of its bounds");
          require(domain.kind() != Domain::Kind::randint || value.is_number_integer(), name + " is not whole");
        }
      }
      ++number;
    }
  }

  void check(const Trial& trial, int number, const std::map<std::string, Json>& before,
             const std::vector<Journal::Line>& lines, bool stops) const {
    const auto& behaviour = plan_.trials.at(static_cast<std::size_t>(number));
    const auto settings = settings_of(number);
    require(trial.config == points_.at(static_cast<std::size_t>(number)).config, "it has another point's settings");

    // From the journal: where its attempts began, and what it had reported and saved by then.
    int attempts_begun = 0, reported = 0, saved = 0, most = 0;
    bool thrown = false, killed_last = false;
    for (const auto& line : lines) {
      if (line.trial != number) continue;
      if (line.word == "begin") {
        require(line.report >= saved,
                "it began at " + std::to_string(line.report) + " and had saved " + std::to_string(saved));
        require(line.report <= most + 1, "it began beyond what it had reported");
        attempts_begun += line.start == start_;
        reported = line.report;
        most = std::max(most, reported);
        thrown = killed_last = false;
      }
      if (line.word == "reported") reported = line.report, most = std::max(most, reported);
      if (line.word == "saved") saved = std::max(saved, line.report);
      if (line.word == "throw") thrown = true;
      if (line.word == "kill") killed_last = true;
    }
    const auto was = before.find(trial.name);
    if (was != before.end()) {
      require(attempts_begun == 0, "it had ended, and has begun again");
      require(json_in(trial.path / "trial.json") == was->second, "it had ended, and its row has changed");
    }

    // Its rows.
    std::vector<Json> rows;
    if (fs::exists(trial.path / "result.json")) rows = Result::from_path(trial.path).metrics_history;
    std::int64_t sum = 0;
    for (int report = 0; const auto& row : rows) {
      const int score = score_of(settings, ++report);
      sum += score;
      require(row.at("training_iteration") == report && row.at("sum") == sum,
              "row " + std::to_string(report) + " is " + row.dump());
      const bool has_metric = behaviour.has_metric_at(report);
      require(row.contains("score") == has_metric, "row " + std::to_string(report) + " has another metric");
      if (!has_metric) continue;
      const auto& have = row.at("score");
      require(behaviour.nan_at == report ? have.is_null() : have == score,
              "row " + std::to_string(report) + " has " + have.dump() + " and not " + std::to_string(score));
    }
    const int count = static_cast<int>(rows.size());
    const auto counts = std::find_if(rows.rbegin(), rows.rend(), [](const Json& row) { return row.contains("score"); });
    require(trial.metrics == (counts != rows.rend() ? *counts
                              : rows.empty()        ? Json()
                                                    : rows.back()),
            "its metrics are not its last row with the score");
    require(count >= saved && count >= reported,
            "rows are lost: of " + std::to_string(reported) + " there are " + std::to_string(count));
    require(count <= plan_.last_report(behaviour), "there are too many rows");
    require(saved == 0 || trial.checkpoint.has_value(), "it has saved, and has no checkpoint");
    const auto there = fs::exists(trial.path) ? list_checkpoints(trial.path).size() : 0;
    require(!plan_.keep || attempts_begun == 0 || there <= static_cast<std::size_t>(*plan_.keep),
            "it keeps " + std::to_string(there) + " checkpoints");

    // Its status.
    require(trial.error.has_value() == (trial.status == TrialStatus::failed), "an error is there, or is not");
    switch (trial.status) {
      case TrialStatus::running:
        throw Wrong("it is said to run");
      case TrialStatus::waiting:
        require(stops, "it waits");
        break;
      case TrialStatus::done:
        require(count == plan_.last_report(behaviour), "it is done after " + std::to_string(count) + " rows");
        require(!thrown, "it is done, and has thrown");
        break;
      case TrialStatus::stopped:
        check_stopped(number, count);
        break;
      case TrialStatus::failed: {
        const std::string error = trial.error->what();
        if (error.find("a rank was lost") != error.npos)
          require(killed_last, "it has failed for ranks that it had not lost");
        else
          require(thrown && error.find("thrown by trial " + std::to_string(number)) != error.npos, "it has failed");
        break;
      }
    }
  }

  std::optional<double> score_at(int number, int report) const {
    const auto& trial = plan_.trials.at(static_cast<std::size_t>(number));
    if (!trial.has_metric_at(report) || report > plan_.last_report(trial)) return {};
    if (trial.nan_at == report) return score_of_nan;
    const int score = score_of(settings_of(number), report);
    return plan_.mode == ScoreOrder::max ? score : -score;
  }

  static constexpr double score_of_nan = -1e9;  ///< worse than every other, even another NaN

  /// Checks that the trial had reached a rung, and that another trial was better there.
  void check_stopped(int number, int count) const {
    require(plan_.scheduler.has_value(), "it was stopped without a scheduler");
    std::int64_t rung = 0;
    for (auto next = plan_.scheduler->grace_period; next < plan_.scheduler->max_t && next <= count;
         next *= plan_.scheduler->reduction_factor)
      rung = next;
    require(rung > 0, "it was stopped before the first rung");
    const auto first_score = [&](int trial) {
      auto report = static_cast<int>(rung);
      while (report < plan_.last_report(plan_.trials.at(static_cast<std::size_t>(trial))) && !score_at(trial, report))
        ++report;
      return std::pair(report, score_at(trial, report));
    };
    const auto [report, own] = first_score(number);
    require(own.has_value() && report == count, "it was stopped, and not at its first score from the rung on");
    bool is_best = *own != score_of_nan;
    for (int other = 0; other < static_cast<int>(points_.size()); ++other)
      if (const auto theirs = first_score(other).second) is_best = is_best && *theirs <= *own;
    require(!is_best, "it was stopped, and is the best");
  }

  /// Checks the scheduler's decisions. A single group runs the trials in order, so they are known.
  void check_decisions(const SweepResult& result) const {
    std::map<std::int64_t, std::vector<double>> rungs;  // the scores at each
    if (plan_.scheduler)
      for (auto rung = plan_.scheduler->grace_period; rung < plan_.scheduler->max_t;
           rung *= plan_.scheduler->reduction_factor)
        rungs[rung] = {};
    for (int number = 0; const auto& trial : result.trials) {
      const auto& behaviour = plan_.trials.at(static_cast<std::size_t>(number));
      auto status = TrialStatus::done;
      int rows = 0;
      std::int64_t compared = 0;  // the last rung at which it was
      while (rows < plan_.last_report(behaviour)) {
        const auto throws = [&](bool after, int report) {
          return plan_.retries == 0 && std::ranges::any_of(drawn_.events, [&](const Event& event) {
                   return event.throws() && event.trial == number && event.report == report && event.after == after;
                 });
        };
        status = TrialStatus::failed;
        if (throws(false, rows + 1) || behaviour.throws_at == rows + 1) break;
        ++rows;
        const auto score = score_at(number, rows);
        // A report without the score leaves the comparison to the next one that has it.
        const auto beyond = rungs.upper_bound(rows), rung = beyond == rungs.begin() ? rungs.end() : std::prev(beyond);
        if (score && rung != rungs.end() && rung->first > compared) {
          compared = rung->first;
          rung->second.push_back(*score);
          auto better = std::ranges::count_if(rung->second, [&](double other) { return other > *score; });
          if (*score == score_of_nan) better = std::ssize(rung->second) - 1;
          const auto goes_on = std::ceil(static_cast<double>(rung->second.size()) / plan_.scheduler->reduction_factor);
          status = TrialStatus::stopped;
          if (static_cast<double>(better) >= goes_on) break;
        }
        status = TrialStatus::failed;
        if (!(plan_.scheduler && rows >= plan_.scheduler->max_t) && throws(true, rows)) break;
        status = TrialStatus::done;
      }
      while (rows > 1 && behaviour.has_metric && !behaviour.has_metric_at(rows)) --rows;  // the last one that counts
      const auto have = trial.metrics.is_null() ? 0 : trial.metrics.at("training_iteration").get<int>();
      require(trial.status == status && have == rows,
              trial.name + " has the status " + std::to_string(static_cast<int>(trial.status)) + " after " +
                  std::to_string(have) + " reports, and not " + std::to_string(static_cast<int>(status)) + " after " +
                  std::to_string(rows));
      ++number;
    }
  }

  void check_best(const SweepResult& result) const {
    const Trial* want = nullptr;
    double most = 0;
    for (const auto& trial : result.trials) {
      if (!has_ended(trial) || !trial.metrics.contains("score") || !trial.metrics.at("score").is_number()) continue;
      const auto score = trial.metrics.at("score").get<double>() * (plan_.mode == ScoreOrder::max ? 1 : -1);
      if (want != nullptr && score <= most) continue;
      want = &trial;
      most = score;
    }
    const auto best = result.best();
    require(best.has_value() == (want != nullptr) && (!best || best->name == want->name), "another one is the best");
  }

  void check_tables(const SweepResult& result) const {
    const auto table = json_in(folder_ / "sweep.json");
    require(table.at("trials").size() == result.trials.size(), "sweep.json has other trials");
    constexpr const char* statuses[] = {"waiting", "running", "done", "stopped by the scheduler", "failed"};
    for (std::size_t i = 0; const auto& trial : result.trials) {
      const auto& row = table.at("trials")[i++];
      require(row.at("trial") == trial.name && row.at("status") == statuses[static_cast<int>(trial.status)] &&
                  row.at("config") == trial.config && row.at("metrics") == trial.metrics,
              "sweep.json says of " + trial.name + ": " + row.dump());
    }
    std::ifstream csv(folder_ / "sweep.csv");
    std::size_t lines = 0;
    for (std::string line; std::getline(csv, line);) ++lines;
    require(lines == result.trials.size() + 1, "sweep.csv has " + std::to_string(lines) + " lines");
    for (const char* file : {"stop", ".stopping"}) require(!fs::exists(folder_ / file), std::string(file) + " is left");
  }

  Launch& launch_;
  const Plan& plan_;
  const int start_;
  const StartPlan drawn_;
  const fs::path folder_, ending_;
  const Journal journal_;
  const std::vector<detail::sweep::TrialSettings> points_;
  std::map<int, int> attempts_;  ///< attempts in this start, by trial number
};

/// Runs all starts of a sweep. Returns the first difference from the model on any rank; empty if there is none.
/// Collective.
std::string play_all_starts(std::uint64_t seed, const Communicator& world, const fs::path& folder, bool aloud) {
  const auto plan = draw(seed, false);
  auto dice = dice_of(seed, 7);
  for (int start = 1; start <= last_start; ++start) {
    const int ranks = dice.between(1, world.size());
    const bool names_seed = start == 1 || dice.chance(0.5);  // otherwise the sweep keeps its seed
    const bool works = world.rank() < ranks;
    const auto part = world.split(works ? 0 : 1);
    std::string differs;
    bool over = false;
    if (works) {
      std::vector<std::string> words{"sweeps", "--storage",   (folder / "runs").string(),
                                     "--name", "sweep",       "--progress",
                                     "none",   "--log-level", aloud ? "info" : "off"};
      if (names_seed) words.insert(words.end(), {"--seed", std::to_string(sweep_seed)});
      const auto drawn = draw_start(plan, start, ranks, false);
      if (!drawn.has_time) words.insert(words.end(), {"--time-limit", "0"});
      std::vector<char*> argv;
      for (auto& word : words) argv.push_back(word.data());
      std::optional<SweepResult> result;
      Launch launch(static_cast<int>(argv.size()), argv.data(), part);
      const int code = launch.run([&] {
        try {
          Start one(launch, plan, start, drawn, {}, sweep_seed);
          result = one.run();
          over = one.is_over(*result);
          return *result;
        } catch (const Wrong& wrong) {
          differs = wrong.what();
          throw;
        }
      });
      // The sweep ends early if no trial has reported the score when one of those without it is done.
      const bool lacks_score = !result && code == static_cast<int>(ExitCode::usage) &&
                               !std::ranges::all_of(plan.trials, &Behaviour::has_metric);
      if (lacks_score) over = start == last_start;
      if (differs.empty() && !result && !lacks_score) differs = "the sweep ends with " + std::to_string(code);
      if (differs.empty() && result && code != static_cast<int>(Start::expected_code(*result)))
        differs = "the sweep ends with " + std::to_string(code) + ", not " +
                  std::to_string(static_cast<int>(Start::expected_code(*result)));
    }
    for (const auto& theirs : world.all_gather(differs))
      if (!theirs.empty())
        return "in start " + std::to_string(start) + " on " + std::to_string(ranks) + " ranks: " + theirs;
    if (world.all_reduce(std::int64_t{over}, ReduceOp::max) != 0) return {};
  }
  return "something is left to do";
}

/// One start of a sweep whose ranks are killed.
int play_one_start(int argc, char** argv) {
  Launch launch(argc, argv);
  std::uint64_t seed = 1;
  int start = 1;
  std::string file;
  launch.app().add_option("--killed", seed);
  launch.app().add_option("--start", start);
  launch.app().add_option("--ending", file);
  return launch.run([&] {
    const auto plan = draw(seed, true);
    Start one(launch, plan, start, draw_start(plan, start, launch.size(), true), file, launch.flags().seed);
    auto result = one.run();
    if (launch.rank() == 0) {
      std::ofstream(file + ".ending") << static_cast<int>(Start::expected_code(result)) << '\n';
      if (one.is_over(result)) std::ofstream(file + ".compared") << result.trials.size() << '\n';
      if (start == most_starts && !one.is_over(result)) throw Wrong("something is left to do");
    }
    return result;
  });
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--killed") return soak::play_one_start(argc, argv);
  return soak::drive(argc, argv, "sweeps", [](const Communicator& world) {
    return [&world](const soak::Round& round) {
      return soak::play_all_starts(round.seed, world, round.folder, round.aloud);
    };
  });
}
