// Which ranks count as late, why, and where the time of a run goes.
#include "observe/late_rank_detector.hpp"
#include "observe/progress_line.hpp"
#include "observe/time_account.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <deque>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace muster::detail::observe::late_ranks_test {
namespace {

std::vector<std::string> hosts(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t rank = 0; rank < count; ++rank) names.push_back("n" + std::to_string(rank));
  return names;
}

/// Windows of workers that wait for each other in every step, with noise.
class Trace {
 public:
  Trace(std::size_t ranks, std::uint64_t seed) : ranks_(ranks), random_(seed) {
    noise_ = 0.005 + 0.06 * uniform();
    spike_chance_ = 0.05 * uniform();
  }

  /// The work of a step is a second. `factor`: of rank `slow`.
  StepWindow next(std::size_t slow = 0, double factor = 1) {
    constexpr int steps = 2;
    StepWindow window{.steps = steps};
    window.times.resize(ranks_);
    window.loads.resize(ranks_);
    for (int step = 0; step < steps; ++step) {
      std::vector<double> own;
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        double seconds = std::exp(noise_ * normal_(random_)) * (rank == slow ? factor : 1);
        if (uniform() < spike_chance_) seconds *= 1 + 3 * uniform();  // the operating system is at work
        own.push_back(seconds);
      }
      const double longest = *std::ranges::max_element(own) + 0.05;
      window.seconds += longest;
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        window.times[rank].compute += own[rank];
        window.times[rank].wait += longest - own[rank];
      }
    }
    return window;
  }

  double uniform() { return std::uniform_real_distribution<double>()(random_); }

 private:
  std::size_t ranks_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  double noise_ = 0, spike_chance_ = 0;
};

TEST(LateRanks, NoneIsNamedAmongEquals) {
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    const std::size_t ranks = 2 + seed % 7;
    Trace trace(ranks, seed);
    LateRankDetector detector(hosts(ranks));
    for (int window = 0; window < 60; ++window) ASSERT_TRUE(detector.add(trace.next()).empty()) << "seed " << seed;
  }
}

TEST(LateRanks, ASlowOneIsNamedWithin30Steps) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const std::size_t ranks = 2 + seed % 7, slow = seed % ranks;
    Trace trace(ranks, seed);
    LateRankDetector detector(hosts(ranks));
    std::vector<LateRank> named;
    for (int step = 0; step < 30; step += 2)
      for (auto& late : detector.add(trace.next(slow, 1.3))) named.push_back(late);
    ASSERT_EQ(named.size(), 1U) << "seed " << seed;
    EXPECT_EQ(named[0].rank, static_cast<int>(slow));
    EXPECT_EQ(named[0].host, "n" + std::to_string(slow));
    EXPECT_EQ(named[0].cause, LateCause::computation);
    EXPECT_GT(named[0].behind, 0.1);
    EXPECT_LT(named[0].behind, 0.5);
  }
}

TEST(LateRanks, OneIsNamedAgainAfterItWasOnTime) {
  Trace trace(4, 1);
  LateRankDetector detector(hosts(4));
  const auto named_in = [&](int windows, double factor) {
    std::size_t named = 0;
    for (int window = 0; window < windows; ++window) named += detector.add(trace.next(2, factor)).size();
    return named;
  };
  EXPECT_EQ(named_in(7, 1.5), 0U) << "8 windows are needed";
  EXPECT_EQ(named_in(30, 1.5), 1U);
  EXPECT_EQ(named_in(12, 1), 0U);
  EXPECT_EQ(named_in(30, 1.5), 1U);
}

TEST(LateRanks, OneWorkerIsNeverLate) {
  LateRankDetector detector(hosts(1));
  Trace trace(1, 1);
  for (int window = 0; window < 20; ++window) EXPECT_TRUE(detector.add(trace.next(0, 2)).empty());
}

TEST(LateRanks, TheCauseIsWhatExplainsTheDelay) {
  const RankTimes none;
  const RankLoad quiet;
  const auto cause = [&](const RankTimes& times, const RankLoad& load) {
    return cause_of(/*behind=*/1, times, load, none, quiet);
  };
  EXPECT_EQ(cause({}, {}), LateCause::computation);
  EXPECT_EQ(cause({.data = 0.8}, {}), LateCause::data);
  EXPECT_EQ(cause({.data = 0.8}, {.read = 0.6}), LateCause::file_system);
  EXPECT_EQ(cause({.data = 0.8}, {.run_queue = 0.9}), LateCause::data);
  EXPECT_EQ(cause({.data = 0.2}, {.run_queue = 0.9}), LateCause::shared_core);
  EXPECT_EQ(cause({}, {.run_queue = 0.9, .other_threads = 0.5}), LateCause::own_threads);
  EXPECT_EQ(cause({}, {.run_queue = 0.9, .other_threads = 0.4}), LateCause::shared_core);
  EXPECT_EQ(cause_of(1, {}, {.run_queue = 0.9, .other_threads = 0.5}, {}, {.other_threads = 0.5}),
            LateCause::shared_core)
      << "the others' threads work as much";
  EXPECT_EQ(cause({}, {.run_queue = 0.1}), LateCause::computation);
  EXPECT_EQ(cause({}, {.run_queue = 0.5, .throttled = 0.5}), LateCause::cpu_quota);
  EXPECT_EQ(cause({.data = 0.8}, {.throttled = 0.5}), LateCause::cpu_quota) << "the threads that read are throttled";
  EXPECT_EQ(cause({}, {.major_faults = 100'000}), LateCause::memory);
  EXPECT_EQ(cause({}, {.major_faults = 10}), LateCause::computation);
  EXPECT_EQ(cause({}, {.clock_throttles = 1}), LateCause::hot_core);
  EXPECT_EQ(cause_of(1, {}, {.clock_throttles = 1}, {}, {.clock_throttles = 1}), LateCause::computation)
      << "the others' cores are as hot";
  EXPECT_EQ(cause_of(1, {}, {.throttled = 0.5}, {}, {.throttled = 0.5}), LateCause::computation)
      << "all ranks of the host are in one control group";
}

TEST(LateRanks, OneWithoutACoreIsNamedAfterFiveLateWindows) {
  // It is behind by 30% in every second window, because it has no core, or for another reason; or only in one window.
  for (const auto& [has_core, every] : {std::pair(false, 2), {true, 2}, {false, 20}}) {
    LateRankDetector detector(hosts(3));
    std::size_t named = 0;
    for (int number = 0; number < 40; ++number) {
      const double behind = number % every == 0 ? (every == 20 ? 3.0 : 0.3) : 0.0;
      StepWindow window{
          .steps = 2, .seconds = 1 + behind, .times = {{.compute = 1}, {.compute = 1 + behind}, {.compute = 1}}};
      window.loads.resize(3);
      if (!has_core) window.loads[1].run_queue = behind;
      for (const auto& late : detector.add(std::move(window))) {
        ++named;
        EXPECT_EQ(late.rank, 1);
        EXPECT_EQ(late.cause, LateCause::shared_core);
      }
    }
    EXPECT_EQ(named, !has_core && every == 2 ? 1U : 0U) << has_core << " " << every;
  }
}

TEST(LateRanks, AQuotaIsNamedThoughItHoldsUpInBursts) {
  // Steps of 10 ms, and a group that is out of processor time for the last 23 of each 100 ms.
  for (const bool is_throttled : {true, false}) {
    LateRankDetector detector(hosts(2));
    std::vector<LateRank> named;
    for (int windows = 0; windows < 40; ++windows) {
      const double burst = windows % 4 == 3 ? 0.023 : 0;
      StepWindow window{
          .steps = 2, .seconds = 0.02 + burst, .times = {{.compute = 0.02, .wait = burst}, {.compute = 0.02 + burst}}};
      window.loads.resize(2);
      if (is_throttled) window.loads[1].throttled = burst;
      for (auto& late : detector.add(std::move(window))) named.push_back(late);
    }
    ASSERT_EQ(named.size(), is_throttled ? 1U : 0U) << "once, until it is on time again";
    if (!is_throttled) continue;
    EXPECT_EQ(named[0].rank, 1);
    EXPECT_EQ(named[0].cause, LateCause::cpu_quota);
    EXPECT_GT(named[0].behind, 0.1);
  }
}

TEST(LateRanks, AFewMillisecondsMoreInEachSaveAreNotLate) {
  LateRankDetector detector(hosts(2));
  for (int saves = 0; saves < 40; ++saves) {
    StepWindow window{
        .steps = 2, .seconds = 0.03, .times = {{.compute = 0.01, .save = 0.02}, {.compute = 0.01, .save = 0.005}}};
    window.loads.resize(2);
    EXPECT_TRUE(detector.add(std::move(window)).empty());
  }
}

TEST(LateRanks, OneThatSavesSlowlyIsNamedAfterEightSaves) {
  // A save in each 20th window. Worker 2 needs `longer` for its part.
  for (const double longer : {4.0, 1.0}) {
    LateRankDetector detector(hosts(3));
    std::vector<std::pair<int, LateRank>> named;
    int saves = 0;
    for (int number = 1; number <= 400; ++number) {
      const double save = number % 20 == 0 ? 1 : 0, slow = save * (1 + longer);
      saves += save > 0 ? 1 : 0;
      StepWindow window{.steps = 2,
                        .seconds = 1 + slow,
                        .times = {{.compute = 1, .wait = slow - save, .save = save},
                                  {.compute = 1, .wait = slow - save, .save = save},
                                  {.compute = 1, .save = slow}}};
      window.loads.resize(3);
      for (auto& late : detector.add(std::move(window))) named.emplace_back(saves, late);
    }
    ASSERT_EQ(named.size(), longer == 4.0 ? 1U : 0U) << "4 of 25 seconds are more than 10%, 1 of 22 is not";
    if (named.empty()) continue;
    EXPECT_EQ(named[0].first, 8);
    EXPECT_EQ(named[0].second.rank, 2);
    EXPECT_EQ(named[0].second.cause, LateCause::saving);
    EXPECT_NEAR(named[0].second.behind, 0.16, 1e-9);
    EXPECT_EQ(text_of(named[0].second),
              "the other ranks wait for rank 2 (n2), for 16% of the time: it takes longer to save its part of the "
              "checkpoints. Look at the file system's load from there, or save less often");
  }
}

TEST(LateRanks, TheCauseIsOfTheWindowsInWhichItWasLate) {
  LateRankDetector detector(hosts(3));
  const auto window = [](double data) {
    StepWindow window{.steps = 2, .seconds = 2 + data, .times = {{.compute = 2}, {.compute = 2}, {.compute = 2}}};
    window.times[1].data = data;
    window.loads.resize(3);
    window.loads[1].run_queue = data > 0 ? 0 : 2;  // while it was on time, it shared its core
    return window;
  };
  std::vector<LateRank> named;
  for (const double data : {0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0})
    for (auto& late : detector.add(window(data))) named.push_back(late);
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].cause, LateCause::data);
  EXPECT_NEAR(named[0].behind, 1.0 / 3, 1e-9);
  EXPECT_EQ(text_of(named[0]),
            "the other ranks wait for rank 1 (n1), for 33% of each step: it waits for its batches. "
            "Prefetch more batches, or have them made faster");
}

TEST(LateRanks, ARankAndACauseAreNamedAtIntervalsThatDouble) {
  LateRankWarnings warnings;
  const LateRankWarnings::Clock::time_point begin{};
  const LateRank slow{.rank = 1, .host = "n1", .cause = LateCause::data, .behind = 0.24};
  std::vector<int> named;
  for (int minute = 0; minute < 200; ++minute)
    if (!warnings.line_about(slow, begin + std::chrono::minutes(minute)).empty()) named.push_back(minute);
  EXPECT_EQ(named, (std::vector<int>{0, 10, 30, 70, 150}));
  EXPECT_EQ(warnings.line_about({.rank = 2, .host = "n1", .cause = LateCause::data, .behind = 0.5}, begin),
            text_of({.rank = 2, .host = "n1", .cause = LateCause::data, .behind = 0.5}))
      << "another rank is news";
  EXPECT_NE(warnings.line_about({.rank = 1, .host = "n1", .cause = LateCause::memory, .behind = 0.5}, begin), "")
      << "as is another cause";
}

TEST(LateRanks, OnASharedMachineOneLineIsForAll) {
  const LateRankWarnings::Clock::time_point begin{};
  const auto lines = [&](std::vector<LateCause> causes) {
    LateRankWarnings warnings;
    std::vector<std::string> said;
    for (int i = 0; i < 40; ++i)
      if (auto line =
              warnings.line_about({.rank = i % 2, .host = "n1", .cause = causes[i % causes.size()], .behind = 0.3},
                                  begin + std::chrono::seconds(i));
          !line.empty())
        said.push_back(std::move(line));
    return said;
  };
  const auto shared = lines({LateCause::shared_core});
  ASSERT_EQ(shared.size(), 1u);
  EXPECT_NE(shared[0].find("its core is shared with other processes"), std::string::npos);
  EXPECT_EQ(lines({LateCause::shared_core, LateCause::computation}).size(), 1u);
  const auto in_turn = lines({LateCause::computation});
  ASSERT_EQ(in_turn.size(), 2u);
  EXPECT_EQ(in_turn[1],
            "the ranks on n1 are late in turn, now rank 1 for 30% of each step: the machine is shared with other "
            "processes. Look for other processes there (top), or ask for whole cores");
}

TEST(LateRanks, TheLiveLineHasTheSlowest) {
  const StepWindow window{.times = {{.compute = 1, .wait = 2}, {.compute = 1, .data = 1.5}},
                          .memory_bytes = {1'000'000'000, 2'100'000'000}};
  EXPECT_EQ(ranks_text(window), "  slowest 1 (data)  2.1 GB");
  EXPECT_EQ(ranks_text({.times = {{.compute = 1}}, .memory_bytes = {1'500'000'000}}), "  1.5 GB");
  EXPECT_EQ(ranks_text({}), "");
}

TEST(RankTimes, ARowHasTheExtremes) {
  const auto summary = summary_of(std::vector<RankTimes>{{.wait = 3}, {.wait = 1}, {.wait = 2}, {.wait = 5}});
  EXPECT_EQ(summary.at("wait"), (Json{{"min", 1.0}, {"median", 2.5}, {"max", 5.0}, {"max_rank", 3}}));
  EXPECT_EQ(summary.at("compute").at("max"), 0.0);
  EXPECT_EQ(summary_of(std::vector<std::int64_t>{5, 9, 9}), (Json{{"max", 9}, {"max_rank", 1}}));
}

/// The content of status.json that a start would write now.
Json written(const TimeAccount& account, const std::string& state) {
  Json status;
  account.add_to(status, state, "");
  return status;
}

Json row(int iteration, double data, double save, std::vector<double> waits) {
  std::vector<RankTimes> times;
  for (const double wait : waits) times.push_back({.wait = wait, .data = data, .save = save});
  return {{"training_iteration", iteration}, {"world_size", waits.size()}, {"rank_times", summary_of(times)}};
}

void write(const std::filesystem::path& path, const std::vector<Json>& values) {
  std::ofstream file(path);
  for (const auto& value : values) file << value.dump() << "\n";
}

TEST(TimeAccount, AddsUpTheReports) {
  const test::Folder run;
  TimeAccount account(run.path(), 3);
  account.start({});
  account.report(row(1, 2, 3, {0.5, 4, 4}));
  account.report(row(2, 1, 0, {1, 1, 1}));
  account.report({{"training_iteration", 3}});  // of an earlier version
  const auto time = written(account, "training").at("time");
  EXPECT_EQ(time.at("data_s"), 3);
  EXPECT_EQ(time.at("saves_s"), 0) << "this thread has saved nothing";
  EXPECT_EQ(time.at("late_s"), 3.5);
  EXPECT_EQ(time.at("repeated_s"), 0);
  EXPECT_EQ(time.at("idle_s"), 0);
  EXPECT_GE(time.at("starting_s"), 0);
  const auto starts = written(account, "training").at("starts");
  ASSERT_EQ(starts.size(), 1U);
  EXPECT_EQ(starts[0].at("world_size"), 3);
  EXPECT_EQ(starts[0].at("state"), "training");
  {
    const watch::ScopedActivity saving(watch::Activity::save);
    written(account, "training");
  }
  EXPECT_GT(written(account, "training").at("time").at("saves_s"), 0);
}

TEST(TimeAccount, TheNextRunOfAProcessStartsAtTheEndOfTheOneBefore) {
  const auto starting_s = [] {
    const test::Folder run;
    TimeAccount account(run.path(), 1);
    account.start({});
    return written(account, "training").at("time").at("starting_s").get<double>();
  };
  using Clock = std::chrono::system_clock;
  const auto begin = Clock::now();
  EXPECT_GE(starting_s(), 0);
  const double second = starting_s();
  EXPECT_GE(second, 0);
  EXPECT_LE(second, std::chrono::duration<double>(Clock::now() - begin).count()) << "not since the process began";
}

TEST(TimeAccount, OfTwoWorkersOneWaitsForTheOther) {
  const test::Folder run;
  TimeAccount account(run.path(), 2);
  account.start({});
  account.report(row(1, 0, 0, {1, 4}));
  EXPECT_EQ(written(account, "training").at("time").at("late_s"), 3);
}

TEST(TimeAccount, StepsAfterTheCheckpointAreDoneAgain) {
  const test::Folder run;
  const double now = static_cast<double>(std::time(nullptr));
  write(run / "status.json",
        {{{"training_iteration", 9},
          {"time", {{"training_s", 100.0}, {"repeated_s", 0}, {"data_s", 50}, {"starting_s", 7}, {"idle_s", 5}}},
          {"starts", {{{"started", now - 5000}, {"ended", now - 4000}, {"world_size", 8}, {"state", "training"}}}}}});
  std::vector<Json> rows;
  for (int iteration = 1; iteration <= 9; ++iteration) rows.push_back(row(iteration, 1, 2, {0, 3, 3}));
  write(run / "result.json", rows);
  TimeAccount account(run.path(), 3);
  account.start({.training_iteration = 6, .global_step = 60, .time_total_s = 70});
  const auto status = written(account, "failed");
  const auto& time = status.at("time");
  EXPECT_EQ(time.at("repeated_s"), 30);
  EXPECT_EQ(time.at("data_s"), 6) << "of the reports that count";
  EXPECT_EQ(time.at("saves_s"), 12);
  EXPECT_EQ(time.at("late_s"), 18);
  EXPECT_GE(time.at("training_s"), 100);
  EXPECT_GE(time.at("starting_s"), 7);
  EXPECT_GT(time.at("idle_s"), 5 + 3000) << "from the last sign of life to the start of this process";
  const auto& starts = status.at("starts");
  ASSERT_EQ(starts.size(), 2U);
  EXPECT_EQ(starts[0].at("state"), "died") << "it has not said how it ended";
  EXPECT_EQ(starts[1].at("state"), "failed");
  EXPECT_EQ(starts[1].at("first_iteration"), 6);
  EXPECT_EQ(starts[1].at("first_step"), 60);

  // The next attempt of this process goes on from the same checkpoint.
  write(run / "status.json", {status});
  TimeAccount next(run.path(), 3);
  next.start({.training_iteration = 6, .global_step = 60, .time_total_s = 70});
  const auto again = written(next, "finished");
  EXPECT_GE(again.at("time").at("repeated_s"), 30);
  EXPECT_EQ(again.at("time").at("idle_s"), time.at("idle_s")) << "the process has been there all the time";
  EXPECT_EQ(again.at("starts").size(), 3U);
  EXPECT_EQ(again.at("starts")[1].at("state"), "failed");
}

TEST(TimeAccount, AStartThatEndedWellRepeatsNothing) {
  const double now = static_cast<double>(std::time(nullptr));
  const auto repeated_after = [&](const char* state) {
    const test::Folder run;
    write(run / "status.json", {{{"time", {{"training_s", 200.0}, {"repeated_s", 10}}},
                                 {"starts",
                                  {{{"started", now - 5000},
                                    {"ended", now - 4900},
                                    {"world_size", 1},
                                    {"state", state},
                                    {"first_time_total_s", 80}}}}}});
    TimeAccount account(run.path(), 1);
    account.start({.training_iteration = 6, .time_total_s = 150});  // 70 s after the beginning of that start
    return written(account, "training").at("time").at("repeated_s").get<double>();
  };
  EXPECT_EQ(repeated_after("finished"), 10);
  EXPECT_EQ(repeated_after("stopped"), 10);
  EXPECT_EQ(repeated_after("failed"), 10 + 30);
}

TEST(TimeAccount, ACheckpointMayBeALaterSignOfLifeThanTheStatus) {
  const test::Folder run;
  const double now = static_cast<double>(std::time(nullptr));
  write(run / "status.json",
        {{{"time", {{"training_s", 100.0}, {"repeated_s", 10}, {"idle_s", 5}}},
          {"starts", {{{"started", now - 5000}, {"ended", now - 4000}, {"world_size", 1}, {"state", "training"}}}}}});
  // The next starts begin where this one has ended. The others live on, so that it is the same time for all.
  TimeAccount(run.path(), 1).start({});
  std::deque<TimeAccount> accounts;
  const auto status_after = [&](double checkpoint_s) {
    auto& account = accounts.emplace_back(run.path(), 1);
    account.start({.time_total_s = checkpoint_s});
    return written(account, "training");
  };
  const auto earlier = status_after(90), later = status_after(98);
  const double saved = 8;  // the checkpoint: 98 s of training and 10 s repeated before; status.json: 100 s of training
  EXPECT_NEAR(earlier.at("time").at("idle_s").get<double>() - later.at("time").at("idle_s").get<double>(), saved, 1e-3);
  EXPECT_NEAR(later.at("starts")[0].at("ended").get<double>(), now - 4000 + saved, 1e-3);
  EXPECT_EQ(later.at("time").at("repeated_s"), 10);
  EXPECT_GE(later.at("time").at("training_s"), 108);
  EXPECT_EQ(status_after(1e9).at("starts")[0].at("ended"), now - 4000) << "a time that cannot be true";
}

TEST(TimeAccount, KeepsTheTotalsOfReportsThatStay) {
  const test::Folder run;
  write(run / "status.json", {{{"training_iteration", 6}, {"time", {{"training_s", 10.0}, {"data_s", 4.5}}}}});
  TimeAccount account(run.path(), 1);
  account.start({.training_iteration = 6, .time_total_s = 10});
  const auto time = written(account, "training").at("time");
  EXPECT_EQ(time.at("data_s"), 4.5);
  EXPECT_EQ(time.at("repeated_s"), 0);
}

TEST(TimeAccount, AStartThatFailsEarlierChangesNothing) {
  const test::Folder run;
  const Json before{{"time", {{"training_s", 10.0}}}, {"starts", Json::array({{{"started", 1}}})}};
  write(run / "status.json", {before});
  EXPECT_EQ(written(TimeAccount(run.path(), 1), "failed"), before);
}

TEST(TimeAccount, BearsAStatusThatIsNone) {
  for (const char* text : {"", "[1, 2]", "{\"time\": 3, \"starts\": 4}", "{\"starts\": [5]}", "{\"time\""}) {
    const test::Folder run;
    std::ofstream(run / "status.json") << text;
    TimeAccount account(run.path(), 1);
    account.start({});
    const auto status = written(account, "training");
    EXPECT_TRUE(status.at("time").is_object()) << text;
    EXPECT_TRUE(status.at("starts").is_array()) << text;
  }
}

}  // namespace
}  // namespace muster::detail::observe::late_ranks_test
