// The figures of `muster bench`: statistics, rows, their two shapes outside, and rounds of programs.
#include "../../apps/muster/bench/alternate.hpp"
#include "../../apps/muster/bench/row.hpp"

#include <signal.h>

#include <muster/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

namespace muster::bench {
namespace {

TEST(Statistics, MedianIsTheMiddle) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 10, 2}), 3);
}

TEST(Statistics, IntervalOfEqualValuesIsAPoint) {
  const auto interval = bootstrap_interval(std::vector<double>(31, 0.5));
  EXPECT_EQ(interval.low, 0.5);
  EXPECT_EQ(interval.high, 0.5);
}

TEST(Statistics, IntervalHoldsTheMedianAndLeavesTheTailsOut) {
  std::vector<double> values;
  for (int i = 1; i <= 101; ++i) values.push_back(i);
  const auto interval = bootstrap_interval(values);
  EXPECT_LT(interval.low, 51);
  EXPECT_GT(interval.high, 51);
  // The order statistics 51 ± 1.96 √101 / 2.
  EXPECT_NEAR(interval.low, 41, 3);
  EXPECT_NEAR(interval.high, 61, 3);
  const auto again = bootstrap_interval(values);
  EXPECT_EQ(again.low, interval.low);
  EXPECT_EQ(again.high, interval.high);
}

TEST(Statistics, EveryCandidateStandsInEveryPlaceAndFollowsAnother) {
  constexpr std::size_t count = 4;
  std::vector<std::map<std::size_t, int>> places(count);
  bool first_after_second = false, second_after_first = false;
  for (int round = 0; round < 8; ++round) {
    const auto order = rotation(round, count);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, (std::vector<std::size_t>{0, 1, 2, 3}));
    for (std::size_t place = 0; place < count; ++place) ++places[place][order[place]];
    for (std::size_t place = 1; place < count; ++place) {
      first_after_second |= order[place] == 0 && order[place - 1] == 1;
      second_after_first |= order[place] == 1 && order[place - 1] == 0;
    }
  }
  for (const auto& place : places)
    for (std::size_t candidate = 0; candidate < count; ++candidate) EXPECT_EQ(place.at(candidate), 2);
  EXPECT_TRUE(first_after_second && second_after_first);
}

Timings quick_muster(double again) {
  return {.candidates = {ours, "mpi", twin}, .ms = {{1, 2, 3}, {2, 4, 12}, {1 * again, 2 * again, 3 * again}}};
}

TEST(Rows, RatiosAreMediansOfTheRoundsRatios) {
  const auto row = make_row("4 KB", quick_muster(1));
  EXPECT_EQ(row.rounds, 3);
  EXPECT_EQ(row.median_ms, (std::vector<std::pair<std::string, double>>{{"muster", 2}, {"mpi", 4}}));
  ASSERT_EQ(row.comparisons.size(), 1U);
  EXPECT_EQ(row.comparisons[0].peer, "mpi");
  EXPECT_EQ(row.comparisons[0].ratio, 0.5);
  EXPECT_EQ(row.twin_ratio, 1);
  EXPECT_TRUE(row.valid());
}

TEST(Rows, AreVoidWhereMusterDiffersFromItself) {
  EXPECT_TRUE(make_row("4 KB", quick_muster(1.04)).valid());
  EXPECT_FALSE(make_row("4 KB", quick_muster(1.06)).valid());
  EXPECT_FALSE(make_row("4 KB", quick_muster(0.94)).valid());
}

TEST(Rows, AreReadFromJson) {
  auto row = make_row("4 KB", quick_muster(1));
  row.notes = {"a note", "another"};
  add_peers(row, {.candidates = {ours, "torch_ddp", "dcp"}, .ms = {{1, 1}, {4, 4}, {}}});
  const auto json = nlohmann::ordered_json::parse(nlohmann::ordered_json(row).dump());
  EXPECT_EQ(json.at("case"), "4 KB");
  EXPECT_EQ(json.at("median_ms").at("torch_ddp"), 4);
  EXPECT_EQ(json.at("ratio").at("torch_ddp"), 0.25);
  EXPECT_EQ(json.at("interval").at("torch_ddp").size(), 2U);
  EXPECT_TRUE(json.at("median_ms").at("dcp").is_null());
  EXPECT_TRUE(json.at("ratio").at("dcp").is_null());
  EXPECT_EQ(json.at("void"), false);
  EXPECT_EQ(json.at("rounds"), 3);
  EXPECT_EQ(json.at("peer_rounds"), (nlohmann::ordered_json{{"torch_ddp", 2}, {"dcp", 0}}));
  Row same;
  add_details(same, json);
  EXPECT_EQ(same.notes, row.notes);
}

TEST(Rows, CarryTheFiguresOfPasses) {
  auto row = make_row("shuffled", quick_muster(1));
  row.pass = PassFigures{.samples = 600,
                         .batch = 64,
                         .samples_per_s = 1234.5,
                         .slowest = 1000,
                         .fastest = 1300,
                         .bytes_per_s = 2.5e6,
                         .first_batch_ms = 0.5,
                         .waiting = 0.25};
  const nlohmann::ordered_json json = row;
  EXPECT_EQ(json.at("pass").at("samples_per_s_range"), (nlohmann::ordered_json{1000, 1300}));
  auto same = make_row("shuffled", quick_muster(1));
  add_details(same, json);
  EXPECT_EQ(nlohmann::ordered_json(same), json);
  EXPECT_EQ(pass_text(row),
            "shuffled: 1234 samples/s (1000 – 1300), 2.5 MB per second; the first batch takes 500 µs; a step that "
            "computes as long as reading a batch takes waits 25 % of its time");
}

TEST(Rows, FitEightyColumnsAndSayWhatIsVoid) {
  auto row = make_row("mlp50 batch 256", quick_muster(1.2));
  add_peers(row, {.candidates = {ours, "torch_ddp_malloc", "no_communication", "dcp"},
                  .ms = {{123.4567, 120}, {98765.4321, 99999}, {0.0000612, 0.00006}, {}}});
  const auto text = row_text(row, true) + row_text(row, false);
  EXPECT_EQ(text.find("candidate"), text.rfind("candidate"));
  EXPECT_NE(text.find(" 0.833  void\n"), std::string::npos) << text;
  EXPECT_NE(text.find("torch_ddp_malloc"), std::string::npos);
  EXPECT_NE(text.find(" 2 rounds\n"), std::string::npos);
  EXPECT_NE(text.find("–            –  failed\n"), std::string::npos) << text;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
}

/// Two programs of muster with others between them, measured in so many rounds.
Timings alternated(const std::vector<std::pair<std::string, std::string>>& others, const Rounds& rounds,
                   std::vector<std::string>& warnings) {
  const auto shell = [](const std::string& script) { return Command{.words = {"sh", "-c", script}}; };
  std::vector<Program> programs{{ours, shell("echo 1")}};
  for (const auto& [name, script] : others) programs.push_back({name, shell(script)});
  programs.push_back({twin, shell("echo 1")});
  Measurement measurement{.rounds = rounds};
  measurement.warn = [&](const std::string& text) { warnings.push_back(text); };
  return alternate(programs, measurement,
                   [](const Finished&, const auto& result) { return result.template get<double>(); });
}

TEST(Alternate, AProgramThatFailsCostsOnlyItsOwnFigures) {
  std::vector<std::string> warnings;
  const auto timings = alternated({{"broken",
                                    "echo '[rank1]: Traceback (most recent call last):' >&2;"
                                    "echo '[rank1]:   File \"a.py\", line 1' >&2;"
                                    "echo '[rank1]: ImportError: there is no numpy' >&2; echo ==== >&2; exit 1"},
                                   {"silent", "exit 3"},
                                   {"peer", "echo 2"}},
                                  {3}, warnings);
  EXPECT_EQ(timings.ms, (std::vector<std::vector<double>>{{1, 1, 1}, {}, {}, {2, 2, 2}, {1, 1, 1}}));
  EXPECT_EQ(warnings,
            (std::vector<std::string>{"running broken: it ended with exit code 1: ImportError: there is no numpy",
                                      "running silent: it ended with exit code 3 and said nothing"}));
}

TEST(Alternate, AProgramThatNeverEndsIsKilledWithWhatItHasStarted) {
  const auto note = std::filesystem::temp_directory_path() / ("bench_test." + std::to_string(::getpid()));
  std::vector<std::string> warnings;
  const auto timings =
      alternated({{"endless", "setsid sleep 1000 & echo $! > " + note.string() + "; sleep 1000"}, {"peer", "echo 2"}},
                 {1, Clock::now() + std::chrono::seconds(2)}, warnings);
  EXPECT_EQ(timings.ms, (std::vector<std::vector<double>>{{1}, {}, {2}, {1}}));
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("running endless: it has not ended within "), std::string::npos) << warnings[0];
  pid_t started = 0;
  std::ifstream(note) >> started;
  std::filesystem::remove(note);
  ASSERT_GT(started, 0);
  EXPECT_EQ(::kill(started, 0), -1);
}

TEST(Alternate, MusterItselfMustNotFail) {
  const std::vector<Program> programs{{ours, Command{.words = {"false"}}}};
  EXPECT_THROW(alternate(programs, Measurement{.rounds = {1}}, {}), Error);
}

}  // namespace
}  // namespace muster::bench
