// What is printed when a run is over.
#include "trainer/run_summary.hpp"

#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

namespace muster::detail::trainer::run_summary_test {
namespace {

Json row(std::int64_t report, Json metrics) {
  metrics.update(
      {{"training_iteration", report}, {"global_step", report * 6}, {"epoch", report - 1}, {"world_size", 3}});
  return metrics;
}

Result result(std::vector<Json> rows) {
  Result made;
  made.path = "runs/demo";
  made.metrics_history = std::move(rows);
  return made;
}

/// The text, after a check that it fits a terminal of 80 columns.
std::string summary(const Result& of, const Json& status = nullptr, const CheckpointConfig& config = {}) {
  const auto text = run_summary(of, config, status);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto columns = std::ranges::count_if(line, [](char byte) { return (byte & 0xC0) != 0x80; });
    EXPECT_LE(columns, 80) << line;
    EXPECT_EQ(std::ranges::count_if(line, [](char byte) { return static_cast<unsigned char>(byte) < 0x20; }), 0)
        << line;
  }
  return text;
}

TEST(RunSummary, HasTheLastAndTheExtremesOfEachMetric) {
  const auto text = summary(result({row(1, {{"loss", 1.23456}, {"accuracy", 0.1}}), row(2, {{"loss", 0.029}}),
                                    row(3, {{"loss", 0.031}, {"accuracy", 0.915}, {"note", "text"}})}));
  EXPECT_EQ(text,
            "finished: 3 reports, 18 steps, 3 ranks\n"
            "  metric                           last    lowest (report)   highest (report)\n"
            "  accuracy                        0.915            0.1 (1)          0.915 (3)\n"
            "  loss                            0.031          0.029 (2)          1.235 (1)\n"
            "  runs/demo\n");
}

TEST(RunSummary, SaysWhatTheTimeWasSpentOn) {
  const Json status{{"time",
                     {{"training_s", 90},
                      {"starting_s", 10},
                      {"saves_s", 5},
                      {"data_s", 20},
                      {"late_s", 0.1},
                      {"repeated_s", 15},
                      {"idle_s", 1000}}}};
  const auto text = summary(result({row(1, {{"loss", 1}})}), status);
  EXPECT_NE(text.find("finished: 1 report, 6 steps, 3 ranks, 1:40\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  time: 50% useful, 20% data, 15% repeated, 10% starting, 5% saves\n"), std::string::npos)
      << text;
}

TEST(RunSummary, FitsWithAllCausesOfLostTime) {
  const Json status{{"time",
                     {{"training_s", 36000},
                      {"starting_s", 4000},
                      {"saves_s", 4000},
                      {"data_s", 4000},
                      {"late_s", 4000},
                      {"repeated_s", 4000}}}};
  const auto text = summary(result({row(1'000'000, {{"loss", 1}})}), status);
  EXPECT_NE(text.find("  time: 50% useful, 10% data, 10% saves, 10% late, 10% repeated, 10% starting\n"),
            std::string::npos)
      << text;
}

TEST(RunSummary, SaysHowTheRunEnded) {
  auto ended = result({row(1, {{"loss", 1}})});
  ended.error = Error(ExitCode::stopped, "training", "stopped on request", "go on");
  EXPECT_TRUE(summary(ended).starts_with("stopped: 1 report"));
  ended.error = Error(ExitCode::user_error, "training", "it has failed", "look");
  EXPECT_TRUE(summary(ended).starts_with("failed: 1 report"));
}

TEST(RunSummary, HasTheSpeedOfAllReports) {
  const auto text = summary(result({row(1, {{"num_samples", 100}, {"time_this_iter_s", 1.5}, {"samples_per_s", 66.7}}),
                                    row(2, {{"num_samples", 300}, {"time_this_iter_s", 0.5}})}));
  EXPECT_NE(text.find("\n  200 samples/s\n"), std::string::npos) << text;
}

TEST(RunSummary, NamesTheNewestAndTheBestCheckpoint) {
  const test::Folder run;
  const auto checkpoint = [&](const std::string& name) {
    std::filesystem::create_directory(run / name);
    return Checkpoint::from_directory(run / name);
  };
  const auto first = checkpoint("checkpoint_000001"), second = checkpoint("checkpoint_000002");
  auto ended = result({row(1, {{"loss", 0.5}}), row(2, {{"loss", 0.7}})});
  ended.checkpoint = second;
  ended.best_checkpoints = {{first, ended.metrics_history[0]}, {second, ended.metrics_history[1]}};
  EXPECT_NE(summary(ended).find("\n  2 checkpoints: the newest is checkpoint_000002\n"), std::string::npos);
  EXPECT_NE(summary(ended, nullptr, {.checkpoint_score_attribute = "loss"})
                .find("\n  2 checkpoints: the newest is checkpoint_000002,\n"
                      "  the best checkpoint_000001 (loss 0.5)\n"),
            std::string::npos);
  ended.best_checkpoints = {{second, {{std::string(200, 'x') + "\n", 1e-300}}}};
  EXPECT_NE(summary(ended, nullptr, {.checkpoint_score_attribute = std::string(200, 'x') + "\n"}).find("… 1e-300)"),
            std::string::npos);
  EXPECT_NE(summary(ended, nullptr, {.checkpoint_score_attribute = "missing"})
                .find("\n  1 checkpoint: the newest is checkpoint_000002\n"),
            std::string::npos);
}

TEST(RunSummary, WithoutReportsIsEmpty) { EXPECT_EQ(summary(result({})), ""); }

TEST(RunSummary, LeavesGapsOutAndShortensWhatIsLong) {
  Json metrics{{std::string(60, 'n'), 1.0}, {"bad\x1b[31m\nname", 2}, {"änderung der größten Größenordnung", 1e-300}};
  for (int i = 0; i < 20; ++i) metrics["m" + std::to_string(100 + i)] = i;
  metrics["gap"] = nullptr;
  auto later = metrics;
  metrics["gap"] = -1.5e300;
  const auto text = summary(result({row(1, metrics), row(2, later)}));
  EXPECT_NE(text.find("  and 12 more metrics\n"), std::string::npos) << text;
  EXPECT_NE(text.find("bad\\x1b[31m name"), std::string::npos) << text;
  EXPECT_NE(text.find("gap                               nan      -1.5e+300 (1)"), std::string::npos) << text;
}

}  // namespace
}  // namespace muster::detail::trainer::run_summary_test
