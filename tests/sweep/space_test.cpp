// The parts of a sweep without ranks: the trials of a space, the scheduler's rule, rows and tables.
#include "sweep/space.hpp"
#include "sweep/asha.hpp"
#include "sweep/folder.hpp"
#include "sweep/progress.hpp"
#include "sweep/table.hpp"

#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace muster::space_test {
namespace {

using namespace detail::sweep;

std::vector<Json> configs_of(const Space& space, int num_samples = 1, std::uint64_t seed = 0) {
  std::vector<Json> configs;
  for (const auto& point : sample_space(space, num_samples, seed)) configs.push_back(point.config);
  return configs;
}

ExitCode code_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::done;
}

TEST(Space, EachSampleHasEveryCombinationOfTheGrids) {
  const Space space{{"a", grid({1, 2})}, {"b", grid({"x", "y", "z"})}};
  const std::vector<Json> once{{{"a", 1}, {"b", "x"}}, {{"a", 1}, {"b", "y"}}, {{"a", 1}, {"b", "z"}},
                               {{"a", 2}, {"b", "x"}}, {{"a", 2}, {"b", "y"}}, {{"a", 2}, {"b", "z"}}};
  EXPECT_EQ(configs_of(space), once);
  auto twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  EXPECT_EQ(configs_of(space, 2), twice);
  const auto points = sample_space(space, 2, 0);
  EXPECT_EQ(points[5].sample, 0);
  EXPECT_EQ(points[6].sample, 1);
  EXPECT_EQ(configs_of({}), std::vector<Json>{Json::object()}) << "an empty space has one trial";
}

TEST(Space, NamesWithDotsLieInsideOfOthers) {
  const auto config = configs_of({{"optimizer.lr", grid({0.5})}, {"optimizer.betas", grid({{0.9, 0.99}})}}).front();
  EXPECT_EQ(config, Json::parse(R"({"optimizer": {"lr": 0.5, "betas": [0.9, 0.99]}})"));
}

TEST(Space, ValuesComeFromTheSeedTheTrialAndTheNameAlone) {
  const Space space{{"lr", log_uniform(1e-4, 1e-1)}, {"layers", randint(1, 5)}};
  const auto first = configs_of(space, 8, 3);
  EXPECT_EQ(first, configs_of(space, 8, 3));
  EXPECT_NE(first, configs_of(space, 8, 4));
  const auto longer = configs_of(space, 20, 3);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), longer.begin())) << "more samples only add trials";
  const auto wider = configs_of({{"dropout", uniform(0, 1)}, space[1], space[0]}, 8, 3);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(wider[i].at("lr"), first[i].at("lr"));
  std::set<double> different;
  for (const auto& config : first) different.insert(config.at("lr").get<double>());
  EXPECT_EQ(different.size(), first.size());
  // Every start of every version has these.
  EXPECT_EQ(configs_of({{"n", randint(0, 1'000'000)}}, 3, 0), configs_of({{"n", randint(0, 1'000'000)}}, 3, 0));
}

TEST(Space, LogarithmicValuesAreNotRoundedOutOfTheirBounds) {
  for (const double low : {1e-3, 3e-7, 0.1}) {
    const double high = std::nextafter(low, 1);
    for (const auto& config : configs_of({{"l", log_uniform(low, high)}}, 100)) {
      const double value = config.at("l");
      EXPECT_TRUE(value >= low && value <= high) << value;
    }
  }
}

TEST(Space, ValuesLieWhereTheyWereAskedFor) {
  constexpr int samples = 2000;
  int below_middle = 0, below_logarithmic_middle = 0;
  std::set<std::int64_t> whole;
  std::map<std::string, int> chosen;
  for (const auto& config : configs_of({{"u", uniform(-1, 3)},
                                        {"l", log_uniform(1e-4, 1e-2)},
                                        {"n", randint(-2, 3)},
                                        {"c", choice({"a", "b", "c"})}},
                                       samples)) {
    const double u = config.at("u"), l = config.at("l");
    EXPECT_TRUE(u >= -1 && u < 3) << u;
    EXPECT_TRUE(l >= 1e-4 && l <= 1e-2) << l;
    below_middle += u < 1;
    below_logarithmic_middle += l < 1e-3;
    ASSERT_TRUE(config.at("n").is_number_integer());
    whole.insert(config.at("n").get<std::int64_t>());
    ++chosen[config.at("c").get<std::string>()];
  }
  EXPECT_EQ(whole, (std::set<std::int64_t>{-2, -1, 0, 1, 2})) << "the upper bound is not among them";
  EXPECT_NEAR(below_middle, samples / 2, samples / 20);
  EXPECT_NEAR(below_logarithmic_middle, samples / 2, samples / 20);
  for (const auto& [value, count] : chosen) EXPECT_NEAR(count, samples / 3, samples / 20) << value;
  using Limits = std::numeric_limits<std::int64_t>;
  for (const auto& config : configs_of({{"n", randint(Limits::min(), Limits::max())}}, 10))
    EXPECT_LT(config.at("n").get<std::int64_t>(), Limits::max());
}

TEST(Space, WhatCannotBeIsRefused) {
  const double infinite = std::numeric_limits<double>::infinity();
  for (const auto& make : std::vector<std::function<void()>>{
           [] { grid({}); }, [] { choice({}); }, [] { uniform(1, 1); }, [=] { uniform(0, infinite); },
           [] { uniform(0, std::nan("")); }, [] { uniform(-1e308, 1e308); }, [] { log_uniform(0, 1); },
           [] { log_uniform(1, 0.5); }, [] { randint(3, 3); },
           [] {
             Domain(Domain::Kind::randint, {0.5, 1});
           },
           [] { Domain(Domain::Kind::uniform, {1}); },
           [=] {
             grid({1, infinite});
           },
           [] {
             choice({{{"clip", std::nan("")}}});
           },
           [] { grid({"a\xff"}); }})
    EXPECT_EQ(code_of(make), ExitCode::usage);
  try {
    grid({1, infinite});
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("it has a value that JSON cannot hold: NaN, infinity"), std::string::npos);
  }
  for (const auto& space : std::vector<Space>{{{"", grid({1})}},
                                              {{"a.", grid({1})}},
                                              {{"a..b", grid({1})}},
                                              {{"a", grid({1})}, {"a", grid({2})}},
                                              {{"a", grid({1})}, {"a.b", grid({2})}},
                                              {{"a.b.c", grid({1})}, {"a.b", grid({2})}}})
    EXPECT_EQ(code_of([&] { sample_space(space, 1, 0); }), ExitCode::usage);
}

TEST(Space, MoreThanAMillionTrialsAreRefused) {
  Space space;
  for (int i = 0; i < 64; ++i) space.emplace_back("s" + std::to_string(i), grid({0, 1}));
  try {
    sample_space(space, 1, 0);
    ADD_FAILURE() << "2^64 combinations";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("its grids and num_samples make more than 1000000 trials"),
              std::string::npos);
  }
  space.resize(20, space.front());
  EXPECT_EQ(code_of([&] { sample_space(space, 1, 0); }), ExitCode::usage) << "2^20 combinations";
  space.resize(3, space.front());
  EXPECT_EQ(code_of([&] { sample_space(space, 125'001, 0); }), ExitCode::usage) << "many samples of few";
  EXPECT_EQ(configs_of(space, 1'000).size(), 8'000u);
  EXPECT_EQ(code_of([] { sample_space({}, 1'000'001, 0); }), ExitCode::usage) << "without a grid";
}

TEST(Scheduler, RungsGrowByTheFactorAndEndBeforeTheLast) {
  using Rungs = std::vector<std::int64_t>;
  EXPECT_EQ(rungs_of({.grace_period = 1, .reduction_factor = 3, .max_t = 27}), (Rungs{1, 3, 9}));
  EXPECT_EQ(rungs_of({.grace_period = 2, .reduction_factor = 4, .max_t = 33}), (Rungs{2, 8, 32}));
  EXPECT_EQ(rungs_of({.grace_period = 5, .reduction_factor = 2, .max_t = 5}), Rungs{});
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(rungs_of({.grace_period = 1, .reduction_factor = 2, .max_t = most}).size(), 63u);
  const Rungs rungs{1, 3, 9};
  EXPECT_EQ(rung_at(rungs, 0, 1), 0u);
  EXPECT_EQ(rung_at(rungs, 1, 2), std::nullopt);
  EXPECT_EQ(rung_at(rungs, 0, 20), 2u) << "the last one that it has come to";
  EXPECT_EQ(rung_at(rungs, 3, 20), std::nullopt);
}

TEST(Scheduler, TheFirstPartGoesOn) {
  EXPECT_TRUE(continues_after_rung(1, {1}, 3)) << "the first to come";
  EXPECT_FALSE(continues_after_rung(1, {1, 2}, 3));
  EXPECT_TRUE(continues_after_rung(2, {1, 2}, 3));
  EXPECT_FALSE(continues_after_rung(2, {1, 2, 3}, 3));
  EXPECT_TRUE(continues_after_rung(2, {0, 1, 2, 3}, 3)) << "two of four, rounded up";
  EXPECT_TRUE(continues_after_rung(1, {1, 1, 1, 1}, 2)) << "who is as good as the best goes on";
  const double worst = -std::numeric_limits<double>::infinity();
  EXPECT_FALSE(continues_after_rung(worst, {worst, -1e300}, 2));
  EXPECT_TRUE(continues_after_rung(worst, {worst}, 2)) << "the first to come";
  EXPECT_FALSE(continues_after_rung(worst, {worst, worst}, 2)) << "no number is not as good as another";
}

TEST(Scheduler, MoreIsBetterWhateverTheMode) {
  EXPECT_EQ(score_of({{"loss", 2.5}}, "loss", ScoreOrder::min), -2.5);
  EXPECT_EQ(score_of({{"hits", 3}}, "hits", ScoreOrder::max), 3);
  EXPECT_EQ(score_of({{"hits", 3}}, "loss", ScoreOrder::max), std::nullopt);
  EXPECT_EQ(score_of(nullptr, "loss", ScoreOrder::max), std::nullopt);
  for (const auto mode : {ScoreOrder::max, ScoreOrder::min})
    EXPECT_EQ(score_of({{"loss", nullptr}}, "loss", mode), -std::numeric_limits<double>::infinity()) << "it was NaN";
}

Trial trial(int number, TrialStatus status, Json metrics, Config config = {{"lr", 0.001}}) {
  Trial made;
  made.name = name_of(number);
  made.config = std::move(config);
  made.status = status;
  made.metrics = std::move(metrics);
  made.path = name_of(number);
  return made;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(Table, IsSortedAndFits) {
  SweepResult sweep{.trials = {}, .path = "runs/sweep", .metric = "val_loss", .mode = ScoreOrder::min, .error = {}};
  Config many;
  for (char c = 'a'; c <= 'z'; ++c) many[std::string(5, c)] = 0.125;
  many["größe"] = "ein sehr langer Wert, der nirgends hineinpasst, mit Umlauten: äöü";
  for (int i = 0; i < 30; ++i)
    sweep.trials.push_back(trial(i, TrialStatus::done, {{"val_loss", 30.0 - i}, {"training_iteration", 27}}, many));
  sweep.trials[3].status = TrialStatus::failed;
  sweep.trials[3].metrics["val_loss"] = 0;
  const auto lines = lines_of(table_of(sweep));
  ASSERT_EQ(lines.size(), 1u + 20 + 1 + 1);
  for (const auto& line : lines) {
    std::size_t characters = 0;
    for (const char c : line) characters += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
    EXPECT_LE(characters, 80u) << line;
  }
  EXPECT_EQ(lines[0].rfind("trial        status", 0), 0u) << lines[0];
  EXPECT_EQ(lines[1].rfind("trial_00029  done", 0), 0u) << lines[1];
  EXPECT_NE(lines[0].find("val_loss"), std::string::npos);
  EXPECT_TRUE(lines[1].ends_with("…")) << lines[1];
  EXPECT_EQ(lines[21], "and 10 more in sweep.csv");
  EXPECT_EQ(lines[22].rfind("best: trial_00029", 0), 0u) << lines[22];
}

TEST(Table, OfFewIsPlain) {
  SweepResult sweep{.trials = {trial(0, TrialStatus::stopped, {{"acc", 0.5}, {"training_iteration", 1}}),
                               trial(1, TrialStatus::done, {{"acc", 0.75}, {"training_iteration", 9}}),
                               trial(2, TrialStatus::waiting, nullptr)},
                    .path = "sweep",
                    .metric = "acc",
                    .mode = ScoreOrder::max,
                    .error = {}};
  EXPECT_EQ(table_of(sweep),
            "trial        status   report   acc     lr\n"
            "trial_00001  done          9  0.75  0.001\n"
            "trial_00000  stopped       1   0.5  0.001\n"
            "trial_00002  waiting                0.001\n"
            "best: trial_00001 (lr 0.001): done, acc 0.75 at report 9\n");
}

TEST(Table, TrialsMayHaveDifferentSettings) {
  const Json sgd{{"o", {{"kind", "sgd"}, {"momentum", 0.5}}}, {"x", 1}}, adam{{"o", {{"kind", "adam"}}}, {"x", 2}};
  const SweepResult sweep{
      .trials = {trial(0, TrialStatus::done, nullptr, adam), trial(1, TrialStatus::done, nullptr, sgd)},
      .path = {},
      .metric = {},
      .mode = ScoreOrder::max,
      .error = {}};
  EXPECT_EQ(table_of(sweep),
            "trial        status  report  o.kind  x  o.momentum\n"
            "trial_00000  done              adam  2\n"
            "trial_00001  done               sgd  1         0.5\n");
}

TEST(Table, TheBestHasEndedWellAndHasTheMetric) {
  SweepResult sweep{
      .trials = {trial(0, TrialStatus::failed, {{"acc", 0.9}}), trial(1, TrialStatus::done, {{"loss", 0}}),
                 trial(2, TrialStatus::done, {{"acc", nullptr}})},
      .path = {},
      .metric = "acc",
      .mode = ScoreOrder::max,
      .error = {}};
  EXPECT_FALSE(sweep.best());
  sweep.trials.push_back(trial(3, TrialStatus::stopped, {{"acc", 0.1}}));
  EXPECT_EQ(sweep.best()->name, "trial_00003");
  sweep.trials.push_back(trial(4, TrialStatus::done, {{"acc", 0.1}}));
  EXPECT_EQ(sweep.best()->name, "trial_00003") << "the first of equals";
}

TEST(Rows, ComeBackAsTheyWere) {
  const test::Folder folder;
  auto written = trial(3, TrialStatus::failed, {{"loss", 0.1}, {"note", "a \"b\", c"}}, {{"o", {{"lr", 0.1}}}});
  written.path = folder.path() / written.name;
  written.error = Error(ExitCode::data, std::string("rank 1 (n2): it is \xff broken"));
  EXPECT_FALSE(read_trial(written.path));
  write_trial(written);
  const auto read = read_trial(written.path);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->config, written.config);
  EXPECT_EQ(read->metrics, written.metrics);
  EXPECT_EQ(read->status, TrialStatus::failed);
  EXPECT_EQ(read->error->code(), ExitCode::data);
  EXPECT_FALSE(read->checkpoint);

  write_tables(folder.path(), {written}, {{"metric", "loss"}});
  std::ifstream csv(folder.path() / "sweep.csv");
  std::string header, line;
  std::getline(csv, header);
  std::getline(csv, line);
  EXPECT_EQ(header, "trial,status,checkpoint,error,loss,note,o.lr");
  EXPECT_TRUE(line.starts_with("trial_00003,failed,,")) << line;
  EXPECT_TRUE(line.ends_with(",0.1,\"a \"\"b\"\", c\",0.1")) << line;
}

TEST(Rows, ThatAreDamagedAreRefused) {
  const test::Folder folder;
  const auto text_of = [&](const Json& row, const std::function<void(const std::filesystem::path&)>& read) {
    std::ofstream(folder.path() / "trial.json") << row;
    try {
      read(folder.path());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::string remedy = "Remove it: the trial goes on from its newest checkpoint";
  const auto row = text_of({{"trial", "trial_00000"}}, [](const auto& trial) { read_trial(trial); });
  EXPECT_TRUE(row.ends_with(remedy)) << row;
  const auto losses = text_of({{"losses", {{"count", "many"}}}}, [](const auto& trial) { read_lost_starts(trial); });
  EXPECT_TRUE(losses.ends_with(remedy)) << losses;
}

TEST(Rows, OfASweepThatIsGoneAreNotWritten) {
  const test::Folder folder;
  auto row = trial(0, TrialStatus::running, nullptr);
  row.path = folder.path() / "gone" / row.name;
  try {
    write_trial(row);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("gone: the folder was moved away or removed"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "gone"));
}

TEST(Rows, GoWithoutACheckpointThatIsGone) {
  const test::Folder folder;
  auto row = trial(0, TrialStatus::done, nullptr);
  row.path = folder.path() / row.name;
  const auto checkpoint = row.path / "checkpoint_000000";
  std::filesystem::create_directories(checkpoint);
  row.checkpoint = Checkpoint::from_directory(checkpoint);
  write_trial(row);
  EXPECT_EQ(read_trial(row.path)->checkpoint->path(), checkpoint);
  const auto moved = folder.path() / "elsewhere";
  std::filesystem::create_directory(moved);
  std::filesystem::rename(row.path, moved / row.name);
  EXPECT_EQ(read_trial(moved / row.name)->checkpoint->path(), moved / row.name / "checkpoint_000000");
  std::filesystem::remove(moved / row.name / "checkpoint_000000");
  EXPECT_FALSE(read_trial(moved / row.name)->checkpoint);
}

TEST(Rows, AMetricMayBeCalledAsTheirColumns) {
  const test::Folder folder;
  auto failed = trial(1, TrialStatus::failed, {{"error", 0.5}});
  failed.error = Error(ExitCode::data, std::string("broken"));
  write_tables(folder.path(), {trial(0, TrialStatus::done, {{"error", 0.25}}), failed}, Json::object());
  std::ifstream csv(folder.path() / "sweep.csv");
  std::string lines[3];
  for (auto& line : lines) std::getline(csv, line);
  EXPECT_EQ(lines[0], "trial,status,checkpoint,error,lr");
  EXPECT_EQ(lines[1], "trial_00000,done,,0.25,0.001");
  EXPECT_EQ(lines[2], "trial_00001,failed,,broken,0.001");
}

TEST(Rows, ASettingMayBeCalledAsAColumnOrAMetric) {
  const test::Folder folder;
  write_tables(folder.path(),
               {trial(0, TrialStatus::done, {{"loss", 0.5}}, {{"status", "on"}, {"loss", "l1"}}),
                trial(1, TrialStatus::waiting, nullptr, {{"status", "off"}, {"loss", "l2"}})},
               Json::object());
  std::ifstream csv(folder.path() / "sweep.csv");
  std::string lines[3];
  for (auto& line : lines) std::getline(csv, line);
  EXPECT_EQ(lines[0], "trial,status,checkpoint,config.loss,config.status,error,loss");
  EXPECT_EQ(lines[1], "trial_00000,done,,l1,on,,0.5");
  EXPECT_EQ(lines[2], "trial_00001,waiting,,l2,off,,");
}

TEST(Rows, OfOthersMakingAreRefused) {
  const test::Folder folder;
  const auto path = folder.path() / name_of(0);
  std::filesystem::create_directory(path);
  for (const char* text :
       {"{}", "[]", "17", "{", R"({"trial": 1})",
        R"({"trial":"t","status":"so so","config":{},"metrics":null,"checkpoint":null,"error":null})",
        R"({"trial":"t","status":"done","config":{},"metrics":null,"checkpoint":7,"error":null})"}) {
    std::ofstream(path / "trial.json") << text;
    EXPECT_EQ(code_of([&] { read_trial(path); }), ExitCode::data) << text;
  }
}

TEST(Progress, OfASweepIsThatOfItsTrials) {
  const test::Folder folder;
  EXPECT_TRUE(progress(folder.path()).empty()) << "an empty run";
  std::filesystem::create_directory(folder.path() / "checkpoint_000002");
  EXPECT_TRUE(progress(folder.path()).empty()) << "a checkpoint that cannot be read";
  const auto sweep = folder.path() / "sweep";
  std::filesystem::create_directory(sweep);
  write_tables(sweep, {}, Json::object());
  detail::run::RunPoints before;
  for (int i = 0; i < 2; ++i) {
    auto row = trial(i, TrialStatus::running, nullptr);
    row.path = sweep / row.name;
    write_trial(row);
    EXPECT_FALSE(detail::run::is_progress(progress(sweep), before)) << "a trial that has only begun";
    row.status = i == 0 ? TrialStatus::done : TrialStatus::stopped;
    write_trial(row);
    EXPECT_TRUE(detail::run::is_progress(progress(sweep), before)) << "a trial that has ended well";
    before = progress(sweep);
    EXPECT_EQ(before.size(), static_cast<std::size_t>(i + 1));
    EXPECT_FALSE(detail::run::is_progress(progress(sweep), before)) << "the same again";
  }
}

}  // namespace
}  // namespace muster::space_test
