// The figures of `muster bench`: statistics, rows, and their two shapes outside.
#include "../../apps/muster/bench/row.hpp"

#include <gtest/gtest.h>

#include <algorithm>
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

TEST(Rows, SurviveJson) {
  auto row = make_row("4 KB", quick_muster(1));
  row.notes = {"a note", "another"};
  add_peers(row, {.candidates = {ours, "torch_ddp"}, .ms = {{1, 1}, {4, 4}}});
  const nlohmann::ordered_json json = row;
  EXPECT_EQ(json.at("case"), "4 KB");
  EXPECT_EQ(json.at("median_ms").at("torch_ddp"), 4);
  EXPECT_EQ(json.at("ratio").at("torch_ddp"), 0.25);
  EXPECT_EQ(json.at("interval").at("torch_ddp").size(), 2U);
  EXPECT_EQ(json.at("void"), false);
  EXPECT_EQ(json.at("rounds"), 3);
  EXPECT_EQ(nlohmann::ordered_json(json.get<Row>()), json);
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
  EXPECT_EQ(nlohmann::ordered_json(json.get<Row>()), json);
  EXPECT_EQ(pass_text(row),
            "shuffled: 1234 samples/s (1000 – 1300), 2.5 MB per second; the first batch takes 500 µs; a step that "
            "computes as long as reading a batch takes waits 25 % of its time");
}

TEST(Rows, FitEightyColumnsAndSayWhatIsVoid) {
  auto row = make_row("mlp50 batch 256", quick_muster(1.2));
  add_peers(row, {.candidates = {ours, "torch_ddp_malloc", "no_communication"},
                  .ms = {{123.4567, 120}, {98765.4321, 99999}, {0.0000612, 0.00006}}});
  const auto text = row_text(row, true) + row_text(row, false);
  EXPECT_EQ(text.find("candidate"), text.rfind("candidate"));
  EXPECT_NE(text.find(" 0.833  void\n"), std::string::npos) << text;
  EXPECT_NE(text.find("torch_ddp_malloc"), std::string::npos);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
}

}  // namespace
}  // namespace muster::bench
