#include "muster/error.hpp"
#include "observe/history.hpp"
#include "observe/progress.hpp"
#include "observe/reduction.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace muster::detail::observe {
namespace {

Json reduced(const std::vector<Metrics>& ranks, bool mean = true) {
  std::vector<Json> encoded;
  for (const auto& metrics : ranks) encoded.push_back(Json::from_cbor(Json::to_cbor(encode(metrics))));
  return reduce(encoded, mean);
}

Mean mean_of(double value, std::int64_t samples) {
  Mean mean;
  mean.add(value, samples);
  return mean;
}

TEST(Mean, WeighsBySamplesAndIgnoresNone) {
  Mean mean;
  EXPECT_TRUE(std::isnan(mean.value()));
  mean.add(1.0, 3);
  mean.add(5.0, 1);
  mean.add(std::nan(""), 0);
  EXPECT_EQ(mean.value(), 2.0);
  EXPECT_EQ(mean.samples(), 4);
}

TEST(Reduction, IsTheMeanOverTheRanksThatGaveIt) {
  const auto row = reduced({{{"a", 1.0}, {"b", 2.0}}, {{"a", 3.0}}});
  EXPECT_EQ(row.at("a"), 2.0);
  EXPECT_EQ(row.at("b"), 2.0);
}

TEST(Reduction, IsWeightedBySamples) {
  EXPECT_EQ(reduced({{{"loss", mean_of(1.0, 3)}}, {{"loss", mean_of(5.0, 1)}}}).at("loss"), 2.0);
  EXPECT_EQ(reduced({{{"loss", mean_of(1.0, 3)}}, {{"loss", Mean()}}}).at("loss"), 1.0) << "an empty rank has no say";
  EXPECT_TRUE(reduced({{{"loss", Mean()}}}).at("loss").is_null());
  EXPECT_EQ(reduced({{{"m", Metric(1.0, 1)}}, {{"m", Metric(4.0, 2)}}}).at("m"), 3.0);
}

TEST(Reduction, KeepsIntegersAndText) {
  const auto row = reduced({{{"n", 7}, {"m", 1}, {"who", "zero"}}, {{"n", 7}, {"m", 2}, {"who", "one"}}});
  EXPECT_TRUE(row.at("n").is_number_integer());
  EXPECT_EQ(row.at("m"), 1.5);
  EXPECT_EQ(row.at("who"), "zero");
}

TEST(Reduction, WritesNaNAsNull) {
  EXPECT_TRUE(reduced({{{"loss", std::nan("")}}}).at("loss").is_null());
  EXPECT_TRUE(reduced({{{"loss", INFINITY}}, {{"loss", 1.0}}}).at("loss").is_null());
}

TEST(Reduction, CanKeepTheList) {
  EXPECT_EQ(reduced({{{"a", 1}}, {{"a", 2}, {"b", 3}}}, false), Json::parse(R"({"a": [1, 2], "b": [3]})"));
}

TEST(Reduction, RefusesReservedNames) {
  EXPECT_THROW(encode({{"global_step", 1}}), Error);
  EXPECT_NO_THROW(encode({{"epoch", 1}}));
}

class HistoryTest : public testing::Test {
 protected:
  std::string content(const char* name) const {
    std::ostringstream text;
    text << std::ifstream(folder / name).rdbuf();
    return text.str();
  }
  static Json row(int iteration, double loss) { return {{"training_iteration", iteration}, {"loss", loss}}; }

  const test::Folder folder;
};

TEST_F(HistoryTest, WritesRowsAndATable) {
  History history(folder, 0, nullptr);
  history.append(row(1, 0.5));
  auto second = row(2, 0.25);
  second["note"] = "a, \"b\"";
  history.append(second);
  EXPECT_EQ(History::read(folder).size(), 2u);
  EXPECT_EQ(content("progress.csv"), "loss,training_iteration,note\n0.5,1,\n0.25,2,\"a, \"\"b\"\"\"\n");
}

TEST_F(HistoryTest, IsCutBackToTheRestoredReport) {
  {
    History history(folder, 0, nullptr);
    for (int i = 1; i <= 4; ++i) history.append(row(i, i));
  }
  std::ofstream(folder / "result.json", std::ios::app) << R"({"training_iter)";
  History history(folder, 2, nullptr);
  EXPECT_EQ(history.rows().size(), 2u);
  EXPECT_EQ(content("progress.csv"), "loss,training_iteration\n1.0,1\n2.0,2\n");
  History behind(folder, 3, row(3, 9));
  EXPECT_EQ(behind.rows().back().at("loss"), 9) << "the row that a crash swallowed";
}

TEST_F(HistoryTest, ALineThatIsNoRowIsNamed) {
  const auto put = [&](const std::string& text) { std::ofstream(folder / "result.json") << text; };
  for (const std::string bad : {"nonsense", "[1]", R"({"training_iteration": "2"})", R"({"training_iteration": -2})",
                                R"({"training_iteration": 1.5})", R"({"training_iteration": 9223372036854775808})"}) {
    put(R"({"training_iteration": 1})"
        "\n" +
        bad +
        "\n"
        R"({"training_iteration": 3})"
        "\n");
    try {
      History(folder, 3, nullptr);
      ADD_FAILURE() << bad << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_NE(std::string(error.what()).find("line 2"), std::string::npos) << error.what();
    }
  }
  put(std::string(140'000, '[') + "\n");
  EXPECT_THROW(History::read(folder), Error);
  put(R"({"loss": 1})"
      "\n\n"
      R"({"training_iteration": 1, "los)");
  EXPECT_EQ(History::read(folder).size(), 1u) << "what a crash has cut off is not damage";
}

TEST_F(HistoryTest, ARowThatCouldNotBeWrittenComesWithTheNext) {
  History history(folder, 0, nullptr);
  history.append(row(1, 0.5));
  std::filesystem::rename(folder / "result.json", folder / "away");
  std::filesystem::create_directory(folder / "result.json");
  EXPECT_THROW(history.append(row(2, 0.25)), Error);
  std::filesystem::remove(folder / "result.json");
  std::ofstream(folder / "away", std::ios::app) << R"({"training_ite)";
  std::filesystem::rename(folder / "away", folder / "result.json");
  history.append(row(3, 0.125));
  history.append(row(4, 0.1));
  EXPECT_EQ(History::read(folder).size(), 4u);
  EXPECT_EQ(content("progress.csv"), "loss,training_iteration\n0.5,1\n0.25,2\n0.125,3\n0.1,4\n");
}

TEST(Progress, FitsItsWidth) {
  const Step step{.epoch = 2, .epochs = 10, .consumed = 300, .samples = 600};
  EXPECT_EQ(progress_line(step, 1234, 60).size(), 59u);
  EXPECT_NE(progress_line(step, 1234, 60).find("50%"), std::string::npos);
  for (int width = 1; width < 60; ++width)
    EXPECT_LT(progress_line(step, 1e6, width).size(), static_cast<std::size_t>(width));
}

TEST(Progress, ReportsNameTheUsersMetrics) {
  const Json row{{"epoch", 2},
                 {"loss", 0.123456},
                 {"global_step", 7},
                 {"samples_per_s", 1500.4},
                 {"checkpoint_dir_name", "checkpoint_000002"}};
  EXPECT_EQ(report_line(row, 10), "epoch 3/10  loss 0.1235  1500 samples/s  checkpoint_000002");
}

}  // namespace
}  // namespace muster::detail::observe
