#include "base/file.hpp"
#include "muster/error.hpp"
#include "observe/callbacks.hpp"
#include "observe/history.hpp"
#include "observe/metrics.hpp"
#include "observe/observers.hpp"
#include "observe/progress_line.hpp"
#include "observe/status_file.hpp"
#include "observe/tensorboard.hpp"
#include "support/folder.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::detail::observe::observe_test {
namespace {

Json reduced(const std::vector<Metrics>& ranks, bool mean = true) {
  std::vector<Json> encoded;
  for (const auto& metrics : ranks) encoded.push_back(Json::from_cbor(Json::to_cbor(to_json(metrics))));
  return mean ? mean_over_ranks(encoded) : list_over_ranks(encoded);
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

TEST(RowOfRanks, IsTheMeanOverTheRanksThatGaveIt) {
  const auto row = reduced({{{"a", 1.0}, {"b", 2.0}}, {{"a", 3.0}}});
  EXPECT_EQ(row.at("a"), 2.0);
  EXPECT_EQ(row.at("b"), 2.0);
}

TEST(RowOfRanks, IsWeightedBySamples) {
  EXPECT_EQ(reduced({{{"loss", mean_of(1.0, 3)}}, {{"loss", mean_of(5.0, 1)}}}).at("loss"), 2.0);
  EXPECT_EQ(reduced({{{"loss", mean_of(1.0, 3)}}, {{"loss", Mean()}}}).at("loss"), 1.0) << "an empty rank has no say";
  EXPECT_TRUE(reduced({{{"loss", Mean()}}}).at("loss").is_null());
  EXPECT_EQ(reduced({{{"m", Metric(1.0, 1)}}, {{"m", Metric(4.0, 2)}}}).at("m"), 3.0);
}

TEST(RowOfRanks, KeepsIntegersAndText) {
  const auto row = reduced({{{"n", 7}, {"m", 1}, {"who", "zero"}}, {{"n", 7}, {"m", 2}, {"who", "one"}}});
  EXPECT_TRUE(row.at("n").is_number_integer());
  EXPECT_EQ(row.at("m"), 1.5);
  EXPECT_EQ(row.at("who"), "zero");
}

TEST(RowOfRanks, WritesNaNAsNull) {
  EXPECT_TRUE(reduced({{{"loss", std::nan("")}}}).at("loss").is_null());
  EXPECT_TRUE(reduced({{{"loss", INFINITY}}, {{"loss", 1.0}}}).at("loss").is_null());
}

TEST(RowOfRanks, RefusesANumberOnSomeRanksOnly) {
  for (const Metric& other : {Metric("x"), Metric(true), Metric(Json::array({1}))}) try {
      reduced({{{"m", 1.0}}, {{"m", other}}});
      ADD_FAILURE() << other.value();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::user_error);
      EXPECT_STREQ(
          error.what(),
          "reporting the metric \"m\": it is a number on some ranks and something else on others. Give the same "
          "metric under that name on every rank");
    }
  EXPECT_EQ(reduced({{{"m", true}}, {{"m", false}}}).at("m"), true) << "rank 0's";
}

TEST(RowOfRanks, CanKeepTheList) {
  EXPECT_EQ(reduced({{{"a", 1}}, {{"a", 2}, {"b", 3}}}, false), Json::parse(R"({"a": [1, 2], "b": [null, 3]})"));
}

TEST(RowOfRanks, NamesWhatIsNoNumber) {
  for (const auto& tensor : {at::ones({2, 3}), at::ones({0}), at::Tensor(), at::ones({1}, at::kComplexFloat)}) {
    try {
      to_json(Metrics{{"fine", at::ones({1, 1})}, {"by_class", tensor}});
      ADD_FAILURE() << "it was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::user_error);
      EXPECT_NE(std::string(error.what()).find("\"by_class\""), std::string::npos) << error.what();
    }
  }
  Mean mean;
  EXPECT_THROW(mean.add(at::ones({2}), 2), Error);
  mean.add(at::ones({2}), 0);
  EXPECT_THROW(mean.add(at::ones({1}, at::kComplexFloat), 2), Error);
  mean.add(at::full({1, 1}, 4.0), 2);
  EXPECT_EQ(mean.value(), 4);
  const auto most = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(to_json(Metrics{{"seed", at::full({}, -1, at::kLong).view(at::kUInt64)}}).at("seed")[0], most);
  EXPECT_EQ(to_json(Metrics{{"seed", most}}).at("seed")[0], most);
}

TEST(RowOfRanks, RefusesReservedNames) {
  EXPECT_THROW(to_json(Metrics{{"global_step", 1}}), Error);
  EXPECT_NO_THROW(to_json(Metrics{{"epoch", 1}}));
}

class HistoryTest : public testing::Test {
 protected:
  std::string content(const char* name) const {
    std::ostringstream text;
    text << std::ifstream(folder / name).rdbuf();
    return text.str();
  }
  History started(std::int64_t training_iteration = 0, const Json& last_row = nullptr) const {
    History history(folder.path());
    history.start({training_iteration, last_row});
    return history;
  }
  static Json row(int iteration, double loss) { return {{"training_iteration", iteration}, {"loss", loss}}; }

  const test::Folder folder;
};

TEST_F(HistoryTest, WritesRowsAndATable) {
  auto history = started();
  history.append(row(1, 0.5));
  auto second = row(2, 0.25);
  second["note"] = "a, \"b\"";
  history.append(second);
  EXPECT_EQ(History::read(folder).size(), 2u);
  EXPECT_EQ(content("progress.csv"), "loss,training_iteration,note\n0.5,1,\n0.25,2,\"a, \"\"b\"\"\"\n");
}

TEST_F(HistoryTest, ARowNamesNoCheckpointThatIsLost) {
  auto history = started();
  auto saved = row(1, 0.5);
  saved["checkpoint_dir_name"] = folder.path().filename().string();
  saved["checkpoint_name"] = "best";
  saved["checkpoint_status"] = "pending_validation";
  history.append(saved);
  history.checkpoint_lost(Checkpoint::from_directory(folder.path()));
  EXPECT_EQ(History::read(folder), std::vector{row(1, 0.5)});
}

TEST_F(HistoryTest, IsCutBackToTheRestoredReport) {
  {
    auto history = started();
    for (int i = 1; i <= 4; ++i) history.append(row(i, i));
  }
  std::ofstream(folder / "result.json", std::ios::app) << R"({"training_iter)";
  const auto before = content("result.json");
  auto history = started(2);
  EXPECT_EQ(history.rows().size(), 2u);
  EXPECT_EQ(content("result.json"), before) << "what begins may yet be refused";
  history.end();
  EXPECT_EQ(content("progress.csv"), "loss,training_iteration\n1.0,1\n2.0,2\n");
  const auto behind = started(3, row(3, 9));
  EXPECT_EQ(behind.rows().back().at("loss"), 9) << "the row that a crash swallowed";
}

Json with_checkpoint(Json row, int checkpoint) {
  row["checkpoint_dir_name"] = "checkpoint_" + std::to_string(checkpoint);
  return row;
}

/// A start from a checkpoint to which the checkpoints with these numbers led.
AttemptStart start_from(std::int64_t training_iteration, const Json& last_row, std::set<std::string> is_ancestor,
                        bool was_given_up = false) {
  return {.training_iteration = training_iteration,
          .last_row = last_row,
          .was_given_up = was_given_up,
          .is_ancestor = [is_ancestor = std::move(is_ancestor)](const std::string& name) {
            return is_ancestor.contains(name);
          }};
}

TEST_F(HistoryTest, OfAnotherCourseOfTrainingIsCutBackToTheLastCommonReport) {
  // Reports 1 to 4 with the checkpoints 0 and 1; the run has gone back to 0 and reported 3 and 4 anew, 4 with 2.
  const auto back = start_from(4, with_checkpoint(row(4, 4), 1), {"checkpoint_0", "checkpoint_1"}, true);
  for (const bool saved : {true, false}) {
    {
      auto history = started();
      history.append(row(1, 1));
      history.append(with_checkpoint(row(2, 2), 0));
      history.append(row(3, 30));
      if (saved) history.append(with_checkpoint(row(4, 40), 2));
    }
    // The second time its own row is there, so the rows led to this checkpoint.
    for (int start = 0; start < 2; ++start) {
      History history(folder.path());
      history.start(back);
      history.end();
      EXPECT_EQ(history.rows(), (std::vector{row(1, 1), with_checkpoint(row(2, 2), 0), with_checkpoint(row(4, 4), 1)}));
      EXPECT_EQ(History::read(folder), history.rows());
    }
  }
  // The checkpoint was saved between two reports and has no row.
  started(4, with_checkpoint(row(4, 40), 2)).end();
  History history(folder.path());
  history.start(start_from(4, nullptr, {"checkpoint_0"}, true));
  EXPECT_EQ(history.rows(), (std::vector{row(1, 1), with_checkpoint(row(2, 2), 0)}));
}

TEST_F(HistoryTest, RowsWithCheckpointsThatDidNotLeadHereAreAnotherCourse) {
  // The checkpoint of report 3 was lost for a while. Reports 2 and 3 were made again, and then it was found.
  const auto found = with_checkpoint(row(3, 3), 2);
  {
    auto history = started();
    history.append(with_checkpoint(row(1, 1), 0));
    history.append(with_checkpoint(row(2, 20), 3));
    history.append(with_checkpoint(row(3, 30), 4));
  }
  History history(folder.path());
  history.start(start_from(3, found, {"checkpoint_0", "checkpoint_1", "checkpoint_2"}));
  EXPECT_EQ(history.rows(), (std::vector{with_checkpoint(row(1, 1), 0), found}));
  history.end();
  // Rows that led to the checkpoint stay, whether or not they have a checkpoint.
  started(2).append(row(2, 2));
  History again(folder.path());
  again.start(start_from(3, found, {"checkpoint_0", "checkpoint_1", "checkpoint_2"}));
  EXPECT_EQ(again.rows(), (std::vector{with_checkpoint(row(1, 1), 0), row(2, 2), found}));
  again.end();
  // Another job may have given its checkpoint the same name.
  started(2).append(with_checkpoint(row(3, 30), 2));
  History third(folder.path());
  third.start(start_from(3, found, {"checkpoint_0", "checkpoint_1", "checkpoint_2"}));
  EXPECT_EQ(third.rows().back(), found);
}

TEST_F(HistoryTest, AddsNoRowsToABackupsHardLinks) {
  started().append(row(1, 1));
  for (const char* name : {"result.json", "progress.csv"})
    std::filesystem::create_hard_link(folder / name, folder / (std::string("backup-") + name));
  started(1).append(row(2, 2));
  EXPECT_EQ(History::read(folder).size(), 2u);
  EXPECT_EQ(content("backup-progress.csv"), "loss,training_iteration\n1.0,1\n");
  EXPECT_NE(content("backup-result.json"), content("result.json"));
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
      started(3);
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
  auto history = started();
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

/// Records its calls.
class Recorder final : public Observer {
 public:
  explicit Recorder(std::vector<std::string>& moments, std::string broken = {})
      : moments_(moments), broken_(std::move(broken)) {}
  void start(const AttemptStart& start) override { note("start", start.training_iteration); }
  void epoch(std::int64_t epoch) override { note("epoch", epoch); }
  void report(const Json& row, std::int64_t epochs) override { note("report", row.at("n").get<int>() + epochs); }
  void checkpoint(const Checkpoint&) override { note("checkpoint", 0); }
  void failure(const Error& error) override { note("failure", static_cast<int>(error.code())); }
  void end() override { note("end", 0); }

 private:
  void note(const std::string& moment, std::int64_t value) {
    if (moment == broken_) throw std::runtime_error("broken");
    moments_.push_back(moment + " " + std::to_string(value));
  }
  std::vector<std::string>& moments_;
  std::string broken_;
};

TEST(Observers, AreToldOfEveryMoment) {
  std::vector<std::string> moments;
  const auto recorders = [&](const char* broken) {
    std::vector<std::unique_ptr<Observer>> observers;
    observers.push_back(std::make_unique<Recorder>(moments, broken));
    observers.push_back(std::make_unique<Recorder>(moments));
    return Observers(std::move(observers));
  };
  auto observers = recorders("");
  observers.tell(&Observer::start, AttemptStart{.training_iteration = 2});
  observers.tell(&Observer::epoch, std::int64_t{1});
  observers.tell(&Observer::report, Json{{"n", 3}}, std::int64_t{10});
  observers.finish({});
  EXPECT_EQ(moments, (std::vector<std::string>{"start 2", "start 2", "epoch 1", "epoch 1", "report 13", "report 13",
                                               "end 0", "end 0"}));
  moments.clear();
  auto broken = recorders("failure");
  EXPECT_NO_THROW(broken.finish(Error(ExitCode::data, "training", "it failed"))) << "only a warning";
  EXPECT_EQ(moments, std::vector<std::string>{"failure 65"}) << "the others are told";
  auto refusing = recorders("report");
  EXPECT_THROW(refusing.tell(&Observer::report, Json{{"n", 3}}, std::int64_t{0}), std::runtime_error);
}

TEST(Observers, AreMadeWhereTheyRun) {
  struct Counter : Callback {
    void on_report(const Json&) override { ++reports; }
    int reports = 0;
  };
  const test::Folder folder;
  const auto counter = std::make_shared<Counter>();
  for (const bool first_worker : {false, true}) {
    Observers observers(first_worker, {.folder = folder.path(), .progress = muster::Progress::none},
                        {.callbacks = {counter}});
    observers.tell(&Observer::start, AttemptStart{});
    observers.tell(&Observer::report_begins, Json{{"training_iteration", 1}});
    observers.tell(&Observer::report, Json{{"training_iteration", 1}}, std::int64_t{0});
    for (const char* file : {"result.json", "status.json"})
      EXPECT_EQ(std::filesystem::exists(folder / file), first_worker) << file;
  }
  EXPECT_EQ(counter->reports, 2) << "on every worker";
}

TEST(Callbacks, TwoClassesOfOneNameHaveAStateEach) {
  std::vector<std::shared_ptr<Callback>> callbacks;
  {
    struct Counter : Callback {
      Json state() const override { return "one"; }
    };
    callbacks.push_back(std::make_shared<Counter>());
  }
  {
    struct Counter : Callback {
      Json state() const override { return "other"; }
    };
    callbacks.push_back(std::make_shared<Counter>());
  }
  const auto state = Callbacks(callbacks).state();
  ASSERT_EQ(state.size(), 2u) << state;
  EXPECT_EQ(state.front(), Json("one"));
  EXPECT_EQ(state.back(), Json("other"));
}

TEST(Progress, FitsItsWidth) {
  const EpochPosition position{.epoch = 2, .epochs = 10, .consumed = 300, .samples = 600, .global_step = 70};
  const auto line = [&](int width) { return progress_line(position, 10, width, "  loss 0.1"); };
  EXPECT_EQ(line(80), "epoch 3/10 [#########........]  50%  10 samples/s  7:30 left  loss 0.1  step 70");
  EXPECT_EQ(line(64), "epoch 3/10   50%  10 samples/s  7:30 left  loss 0.1  step 70");
  EXPECT_EQ(line(56), "epoch 3/10   50%  10 samples/s  7:30 left  loss 0.1");
  EXPECT_EQ(line(45), "epoch 3/10   50%  10 samples/s  7:30 left");
  EXPECT_EQ(line(32), "epoch 3/10   50%  10 samples/s");
  for (int width = 1; width < 200; ++width)
    EXPECT_LT(progress_line(position, 1e6, width, "  loss 0.1").size(), static_cast<std::size_t>(width));
  EXPECT_EQ(live_text({{"live",
                        {{"heat",
                          {{"in_memory", 10},
                           {"room", 12},
                           {"on_its_way", 3},
                           {"uses_per_sample", 2.125},
                           {"solver_wait_s", 0.5},
                           {"trainer_wait_s", 2},
                           {"dropped_by_solver", 4},
                           {"lost", 0}}}}}}),
            "  heat 10/12 in memory, 3 on their way, 2.125 uses each, solvers waited 0.5 s, trainer 2 s, 4 dropped");
  EXPECT_EQ(live_text({{"loss", 1}}), "");
  EXPECT_EQ(progress_line({.epoch = 1, .consumed = 60, .samples = 100, .global_step = 5}, 0.01, 70),
            "epoch 2 [####..]  60%  0 samples/s  1:06:40 left in the epoch  step 5");
}

TEST(Progress, EndlessRunsHaveNoTimeLeft) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  const EpochPosition position{.epoch = 0, .epochs = most, .consumed = 5, .samples = most, .global_step = 1};
  EXPECT_EQ(progress_line(position, 10, 200).find("left"), std::string::npos);
}

TEST(Progress, ReportsNameTheUsersMetrics) {
  const Json row{{"epoch", 2},
                 {"loss", 0.123456},
                 {"global_step", 7},
                 {"samples_per_s", 1500.4},
                 {"checkpoint_dir_name", "checkpoint_000002"}};
  EXPECT_EQ(report_line(row, 10), "epoch 3/10  loss 0.1235  1500 samples/s  checkpoint_000002");
}

Json status_of(const std::filesystem::path& run) {
  std::ifstream file(run / "status.json");
  return file.is_open() ? Json::parse(file) : Json();
}

TEST(StatusFile, SaysHowFarTrainingIs) {
  const test::Folder run;
  StatusFile file(run.path(), 4);
  file.start({});
  EXPECT_TRUE(status_of(run.path()).is_null()) << "a start may yet be refused";
  file.failure(Error(ExitCode::data, "refused"));
  EXPECT_TRUE(status_of(run.path()).is_null()) << "and then it has changed nothing";
  file.batch({.epoch = 1, .epochs = 3, .consumed = 40, .samples = 100, .global_step = 14});
  auto status = status_of(run.path());
  EXPECT_EQ(status.at("state"), "training");
  EXPECT_EQ(status.at("epoch"), 1);
  EXPECT_EQ(status.at("world_size"), 4);
  EXPECT_TRUE(status.at("run_s_left").is_null()) << "no speed is known yet";
  file.report({{"training_iteration", 2}, {"samples_per_s", 20.0}, {"loss", 0.5}}, 3);
  EXPECT_EQ(status_of(run.path()), status) << "not at every event";
  file.failure(Error(ExitCode::retry, "the cause"));
  status = status_of(run.path());
  EXPECT_EQ(status.at("state"), "failed");
  EXPECT_EQ(status.at("error"), "the cause");
  EXPECT_EQ(status.at("epoch_s_left"), 3.0);
  EXPECT_EQ(status.at("run_s_left"), 8.0);
  EXPECT_EQ(status.at("last_report").at("loss"), 0.5);
  file.end();
  EXPECT_EQ(status_of(run.path()).at("state"), "finished");
}

TEST(StatusFile, HasTheBestValueOfTheRows) {
  const test::Folder run;
  const CheckpointConfig score{.checkpoint_score_attribute = "loss", .checkpoint_score_order = ScoreOrder::min};
  History history(run.path());
  StatusFile file(run.path(), 1, score, &history), without_score(run.path(), 1, {}, &history), validated(run.path(), 1);
  history.start({});
  for (auto* one : {&file, &without_score, &validated}) one->start({});
  int iteration = 0;
  for (const Json& loss : {Json(0.5), Json(nullptr), Json(0.25), Json("none"), Json(0.75)}) {
    const Json row{{"training_iteration", ++iteration}, {"loss", loss}};
    history.report(row, 0);
    file.report(row, 0);
  }
  file.end();
  EXPECT_EQ(status_of(run.path()).at("best"), (Json{{"loss", 0.25}}));
  without_score.end();
  EXPECT_EQ(status_of(run.path()).at("best"), Json::object());
  validated.end();
  EXPECT_FALSE(status_of(run.path()).contains("best")) << "a validation may give a row another value later";
  History next_history(run.path());
  StatusFile next_file(run.path(), 1, score, &next_history);
  next_history.start({});
  next_file.start({});
  next_file.end();
  EXPECT_EQ(status_of(run.path()).at("best"), (Json{{"loss", nullptr}})) << "the next start cuts the rows back";
}

TEST(StatusFile, AStartThatTrainsNothingMoreLeavesThePosition) {
  const test::Folder run;
  const Json row{{"training_iteration", 2}, {"loss", 0.5}};
  {
    StatusFile file(run.path(), 1);
    file.start({});
    file.batch({.epoch = 1, .epochs = 2, .consumed = 100, .samples = 100, .global_step = 20});
    file.report(row, 2);
    file.end();
  }
  const auto position = [&] {
    const auto status = status_of(run.path());
    Json found;
    for (const char* key :
         {"epoch", "epochs", "consumed", "samples", "global_step", "training_iteration", "last_report"})
      found[key] = status.at(key);
    return found;
  };
  const auto kept = position();
  for (const Json& last_row : {row, Json()})  // null: the checkpoint was saved between two reports
    for (const bool fails : {false, true}) {
      StatusFile again(run.path(), 1);
      again.start({.training_iteration = 2, .last_row = last_row, .global_step = 20});
      fails ? again.failure(Error(ExitCode::user_error, "the cause")) : again.end();
      EXPECT_EQ(position(), kept);
    }
  StatusFile anew(run.path(), 1);
  anew.start({});
  anew.end();
  EXPECT_EQ(status_of(run.path()).at("epochs"), 0) << "it has begun from nothing";
  for (const char* broken :
       {"[]", "{\"epoch\": \"x\", \"global_step\": 20, \"training_iteration\": 2, \"last_report\": 7}"}) {
    std::ofstream(run / "status.json") << broken;
    StatusFile file(run.path(), 1);
    file.start({.training_iteration = 2, .global_step = 20});
    file.end();
    EXPECT_EQ(status_of(run.path()).at("epoch"), 0);
  }
}

TEST(StatusFile, KnowsTheEpochOfALoopThatTellsOfNoBatches) {
  const test::Folder run;
  StatusFile file(run.path(), 1);
  file.start({});
  for (const Json& epoch : {Json(0), Json(1), Json(7), Json("two")})
    file.report({{"training_iteration", 1}, {"epoch", epoch}}, 3);
  file.end();
  EXPECT_EQ(status_of(run.path()).at("epoch"), 1) << "the others are the user's own values";
}

/// The names of a folder's event files, in the order in which readers take them.
std::vector<std::string> event_files(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) names.insert(entry.path().filename());
  return {names.begin(), names.end()};
}

TEST(TensorBoard, ALaterStartHasALaterFile) {
  const test::Folder run;
  const Json row{{"training_iteration", 1}, {"global_step", 5}, {"loss", 0.5}};
  std::vector<std::string> before;
  for (int start = 0; start < 3; ++start) {  // within a second
    const auto files = make_tensorboard(run.path(), {{"lr", 0.1}});
    files->start({.training_iteration = start, .global_step = 5 * start});
    EXPECT_EQ(event_files(run.path()), before) << "a start may yet be refused";
    files->report(row, 0);
    files->end();
    const auto names = event_files(run.path());
    ASSERT_EQ(names.size(), before.size() + 1);
    EXPECT_EQ(std::vector(names.begin(), names.end() - 1), before);
    before = names;
  }
}

TEST(TensorBoard, ShowsEachValidationOnceAndApartFromWhatWasReported) {
  const test::Folder run;
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (const auto& name : event_files(run.path())) {
      const auto bytes = read_file(run / name);
      for (auto at = bytes.find(text); at != bytes.npos; at = bytes.find(text, at + 1)) ++found;
    }
    return found;
  };
  const Json fields{{"checkpoint_status", "validated"}, {"score", 0.25}, {"accuracy", 0.75}};
  std::vector<Json> rows;
  const auto write_rows = [&] {
    std::ofstream file(run / "result.json");
    for (const auto& row : rows) file << row.dump() << "\n";
  };
  {
    const auto files = make_tensorboard(run.path(), {});
    files->start({});
    for (const int number : {1, 2, 3}) {
      auto& row = rows.emplace_back(Json{{"training_iteration", number},
                                         {"global_step", 5 * number},
                                         {"checkpoint_status", "pending_validation"},
                                         {"score", 0.5}});
      files->report(row, 0);
    }
    EXPECT_EQ(count("score"), 3) << "at once, whatever validations will give";
    files->validated(2, fields);
    rows[1].update(fields);
    write_rows();
  }
  EXPECT_EQ(count("validation/score"), 1);
  EXPECT_EQ(count("score"), 4) << "no second value under the name";
  EXPECT_EQ(count("accuracy"), 1);
  const auto files = make_tensorboard(run.path(), {});
  files->start({.training_iteration = 3, .global_step = 15});
  for (const int number : {1, 2}) files->validated(number, fields);  // the second one is read again from its file
  EXPECT_EQ(count("validation/score"), 2) << "the row of an earlier start had the name";
  EXPECT_EQ(count("score"), 5);
  EXPECT_EQ(count("accuracy"), 2);
  files->validated(3, {{"checkpoint_status", "validation_failed"}});
  EXPECT_EQ(count("score"), 5) << "a validation that has failed replaces nothing";
}

TEST(TensorBoard, AStartWithNothingLeftToTrainSaysThatTheRunHasEnded) {
  const test::Folder run;
  const auto stopped = make_tensorboard(run.path(), {});
  stopped->start({});
  stopped->report({{"training_iteration", 1}, {"global_step", 5}, {"loss", 0.5}}, 0);
  const auto again = make_tensorboard(run.path(), {});
  again->start({.training_iteration = 1, .global_step = 5});
  again->end();
  const auto names = event_files(run.path());
  ASSERT_EQ(names.size(), 2);
  EXPECT_NE(read_file(run / names[1]).find("_hparams_/session_end_info"), std::string::npos);
}

TEST(TensorBoard, ARunGoesOnWithoutFilesThatCannotBeWritten) {
  const test::Folder folder;
  const auto files = make_tensorboard(folder / "nowhere", {});
  files->start({});
  files->scalar("a", 1, 1);
  files->report({{"loss", 0.5}}, 0);
  files->end();
  EXPECT_FALSE(std::filesystem::exists(folder / "nowhere"));
}

}  // namespace
}  // namespace muster::detail::observe::observe_test
