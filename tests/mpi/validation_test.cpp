// Validation of checkpoints: who does it and when, where what is found stands, and what becomes of one that fails.
#include "support/job.hpp"

#include "base/file.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/retention.hpp"
#include "comm/make_world.hpp"
#include "observe/history.hpp"
#include "storage/tier.hpp"
#include "support/folder.hpp"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::validation_test {
namespace {

namespace fs = std::filesystem;
using test::run;
using test::world;

using Loop = std::function<void(Session&, const Config&)>;

/// A validation on this rank: of which report, by how many ranks.
using Call = std::pair<std::int64_t, int>;

std::int64_t number_in(const Checkpoint& checkpoint) {
  std::int64_t number = 0;
  checkpoint.load("number", number);
  return number;
}

/// Gives twice the checkpoint's number, and notes who was asked.
ValidationFunction doubling(std::vector<Call>& calls) {
  return [&calls](Session& session, const Checkpoint& checkpoint) -> Config {
    const auto number = number_in(checkpoint);
    calls.emplace_back(number, session.world_size());
    return {{"double", 2 * number}};
  };
}

TorchTrainerOptions with(std::string name, ValidationFunction validate, int workers = world().size()) {
  return {.scaling_config = {.num_workers = workers},
          .run_config = {.name = std::move(name)},
          .datasets = {{"train", test::line()}, {"test", test::line()}},
          .validation = {.function = std::move(validate)}};
}

/// Some ranks train and some do not, where there are two.
int some_workers() { return std::max(1, world().size() - 2); }
int spares() { return world().size() - some_workers(); }

/// Reports until that number, each time with a validation; `each` comes after a report.
Loop reporting(std::int64_t reports, std::function<void(Session&, std::int64_t)> each = {}) {
  return [=](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    state.restore();
    while (number < reports) {
      ++number;
      session.report({{"number", number}}, state, {.validation = true});
      if (each) each(session, number);
    }
  };
}

fs::path checkpoint_of(const fs::path& run, std::int64_t number) {
  return run / ("checkpoint_00000" + std::to_string(number - 1));
}

/// On the first worker: until the checkpoint of that report has been validated.
void wait_for_validation(const Session& session, const fs::path& run, std::int64_t number) {
  if (session.world_rank() > 0) return;
  while (!fs::exists(checkpoint_of(run, number) / "validation.json"))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

Json column(const std::vector<Json>& rows, const std::string& name) {
  Json values = Json::array();
  for (const auto& row : rows) values.push_back(row.value(name, Json("missing")));
  return values;
}
Json statuses(const std::optional<Result>& result) { return column(result->metrics_history, "checkpoint_status"); }
Json doubles(const std::optional<Result>& result) { return column(result->metrics_history, "double"); }

constexpr const char* validated = "validated";
constexpr const char* pending = "pending_validation";

TEST(Validation, BySparesWhileTheOthersTrain) {
  if (spares() == 0) GTEST_SKIP() << "no rank is left over";
  const auto storage = test::shared_folder();
  const auto folder = storage / "beside";
  std::vector<Call> calls;
  int reports = 0;
  const auto train = reporting(2, [&](Session& session, std::int64_t number) {
    if (number == 2) return;
    wait_for_validation(session, folder, 1);
    // Its row has it before training ends.
    for (std::string seen; seen.empty(); ++reports) {
      session.report({{"loss", 0.5}});
      const bool there =
          session.world_rank() == 0 && detail::observe::History::read(folder).front().value("double", Json()) == 2;
      seen = session.communicator().broadcast(there ? "there" : "");
    }
  });
  const auto [code, result] = run({storage, {}, with("beside", doubling(calls), some_workers())}, train);
  EXPECT_EQ(code, 0);
  const bool works = world().rank() < some_workers();
  const auto first = std::ranges::find(calls, 1, &Call::first);
  EXPECT_EQ(first == calls.end(), works) << "those validate that do not train";
  if (!works) {
    EXPECT_EQ(first->second, spares());
  }
  const auto& rows = result->metrics_history;
  EXPECT_EQ(rows.front().at("checkpoint_status"), validated);
  EXPECT_EQ(rows.back().at("checkpoint_status"), validated);
  EXPECT_EQ(rows.back().at("double"), 4);
  EXPECT_FALSE(rows.at(1).contains("double"));
  EXPECT_EQ(result->metrics.at("double"), 4);
}

TEST(Validation, EndsTrainingByWhatItGives) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "early";
  std::vector<Call> calls;
  auto options = with("early", doubling(calls), some_workers());
  const auto stops = [] { return early_stopping({.metric = "double", .mode = ScoreOrder::min, .patience = 2}); };
  options.run_config.callbacks = {stops()};
  bool fails = true;
  const auto train = reporting(9, [&](Session& session, std::int64_t number) {
    if (number == 2 && std::exchange(fails, false)) throw std::runtime_error("between two results");
    wait_for_validation(session, folder, number);
  });
  const auto [code, result] = run({storage, {}, options}, train);
  if (spares() == 0) {
    EXPECT_EQ(code, 64);
    EXPECT_NE(std::string(result->error->what())
                  .find("this report does not have it, and its validation ends only after "
                        "training"),
              std::string::npos)
        << result->error->what();
    return;
  }
  EXPECT_EQ(code, 1);
  options.run_config.callbacks = {stops()};
  const auto again = run({storage, {}, options}, train);
  EXPECT_EQ(again.first, 0);
  const auto rows = doubles(again.second);
  EXPECT_GE(rows.size(), 4u) << "the third value is the second that is no better, and is known at a later report";
  EXPECT_LT(rows.size(), 9u);
  EXPECT_EQ(rows[2], 6);
}

/// Throws when it is told of the second validation.
class ThrowsAtTheSecond final : public Callback {
 public:
  void on_validated(const Json&) override {
    if (++count_ == 2) throw std::runtime_error("no such value");
  }

 private:
  int count_ = 0;
};

TEST(Validation, WhatACallbackThrowsIsThrownOnAll) {
  if (spares() == 0) GTEST_SKIP() << "no rank is left over";
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  auto options = with("throws", doubling(calls), some_workers());
  options.run_config.callbacks = {std::make_shared<ThrowsAtTheSecond>()};
  options.run_config.failure_config.max_failures = 1;
  std::vector<std::string> errors;
  const auto train = [&](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    state.restore();
    while (number < 5) try {
        ++number;
        session.report({{"number", number}}, state, {.validation = true});
        wait_for_validation(session, storage / "throws", number);
      } catch (const std::exception& error) {
        errors.emplace_back(error.what());
        throw;
      }
  };
  const auto [code, result] = run({storage, {}, options}, train);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(doubles(result), Json({2, 4, 6, 8, 10}));
  EXPECT_EQ(errors.size(), world().rank() < some_workers() ? 1u : 0u);
  for (const auto& error : errors) EXPECT_NE(error.find("no such value"), std::string::npos) << error;
}

TEST(Validation, ByAllAtTheEnd) {
  const auto storage = test::shared_folder();
  std::vector<int> sizes;
  std::size_t while_training = 1;
  const auto validate = [&](Session& session, const Checkpoint& checkpoint) -> Metrics {
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_EQ(session.get_checkpoint()->path(), checkpoint.path());
    EXPECT_EQ(session.mean(at::ones({})).item<double>(), 1);
    sizes.push_back(session.world_size());
    Mean x;
    for (auto& batch : session.get_dataset_shard("test").iter_torch_batches({.batch_size = 4}))
      x.add(batch["x"].mean(), batch.size());
    return {{"x", x}, {"rank", session.world_rank()}, {"bad", std::nan("")}, {"after_training", 0.5}};
  };
  const auto train = reporting(2, [&](Session&, std::int64_t) { while_training = sizes.size(); });
  auto options = with("end", validate);
  options.run_config.tensorboard = true;
  const auto [code, result] = run({storage, {}, options}, train);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(while_training, 0u);
  EXPECT_EQ(sizes, (std::vector<int>(2, world().size())));
  EXPECT_EQ(statuses(result), Json({validated, validated}));
  for (const auto& row : result->metrics_history) {
    EXPECT_NEAR(row.at("x").get<double>(), 45.0 / 2 / 46, 1e-6) << "every sample counts once";
    EXPECT_EQ(row.at("rank").get<double>(), (world().size() - 1) / 2.0);
    EXPECT_EQ(row.at("bad"), nullptr);
  }
  std::string events;
  for (const auto& entry : fs::directory_iterator(result->path))
    if (entry.path().filename().string().starts_with("events.")) events += detail::read_file(entry.path());
  EXPECT_NE(events.find("after_training"), std::string::npos);
  // Beside the manifest, which knows nothing of it; who looks at checkpoints sees both.
  const auto folder = checkpoint_of(result->path, 2);
  const auto file = Json::parse(detail::read_file(folder / "validation.json"));
  EXPECT_EQ(file.at("checkpoint_status"), validated);
  EXPECT_EQ(Json::parse(detail::read_file(folder / "manifest.json")).at("metrics").at("checkpoint_status"), pending);
  for (const auto& info : list_checkpoints(result->path)) {
    EXPECT_EQ(info.status, CheckpointStatus::validated);
    EXPECT_EQ(info.metrics.at("x"), file.at("x"));
    EXPECT_EQ(verify_checkpoint(info.path).problem, "");
  }
  const auto table = detail::read_file(result->path / "progress.csv");
  EXPECT_NE(table.substr(0, table.find('\n')).find(",x"), std::string::npos) << table;
}

TEST(Validation, PendingIsPinned) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  auto options = with("pinned", doubling(calls));
  options.run_config.checkpoint_config.num_to_keep = 1;
  std::vector<int> seen;
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    for (number = 1; number <= 3; ++number) session.report({{"number", number}}, state, {.validation = number == 1});
    for (const auto& info : list_checkpoints(storage / "pinned")) seen.push_back(info.index);
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(seen, (std::vector<int>{0, 2})) << "the one that waits, and the newest";
  EXPECT_EQ(calls, (std::vector<Call>{{1, world().size()}}));
  EXPECT_EQ(doubles(result), Json({2, "missing", "missing"}));
  EXPECT_EQ(result->best_checkpoints.size(), 1u) << "it may go when it has been validated";
}

TEST(Validation, PinnedOnesStayBesideThoseThatAreKept) {
  using detail::checkpoint::ScoredCheckpoint, detail::checkpoint::indices_to_prune;
  const std::vector<ScoredCheckpoint> all{
      {0, 3.0}, {.index = 1, .score = {}, .pinned = true}, {2, 9.0}, {3, 1.0}, {4, 2.0}};
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 2}), (std::vector<int>{0, 2}));
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 1, .checkpoint_score_attribute = "score"}), (std::vector<int>{0, 3}));
  EXPECT_EQ(indices_to_prune({{0, {}}, {.index = 1, .score = {}, .pinned = true}}, {.num_to_keep = 1}),
            std::vector<int>{})
      << "whose newest waits";
}

TEST(Validation, RetentionReadsBoth) {
  const auto storage = test::shared_folder();
  const std::vector<double> scores{0.5, 0.1, 0.3};
  const auto validate = [&](Session&, const Checkpoint& checkpoint) -> Config {
    return {{"score", scores.at(static_cast<std::size_t>(number_in(checkpoint) - 1))}};
  };
  auto options = with("both", validate);
  options.run_config.checkpoint_config = {.num_to_keep = 2, .checkpoint_score_attribute = "score"};
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    for (number = 1; number <= 3; ++number) session.report({{"number", number}}, state, {.validation = true});
    // One of which a report knows the score already.
    number = 4;
    session.report({{"number", number}, {"score", 0.4}}, state);
  });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
  ASSERT_EQ(result->best_checkpoints.size(), 2u);
  EXPECT_EQ(result->best_checkpoints[0].second.at("score"), 0.5);
  EXPECT_EQ(result->best_checkpoints[0].first.path(), checkpoint_of(result->path, 1));
  EXPECT_EQ(result->best_checkpoints[1].second.at("score"), 0.4);
}

std::vector<int> indices_in(const fs::path& run) {
  world().barrier();
  std::vector<int> indices;
  for (const auto& info : list_checkpoints(run)) indices.push_back(info.index);
  world().barrier();
  return indices;
}

TEST(Validation, AScoreThatNoneGivesRemovesNothing) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  auto options = with("misspelt", doubling(calls));
  options.run_config.checkpoint_config = {.num_to_keep = 1, .checkpoint_score_attribute = "duoble"};
  testing::internal::CaptureStderr();
  EXPECT_EQ(run({storage, {"--log-level", "warn"}, options}, reporting(3)).first, 0);
  const auto said = world().broadcast(testing::internal::GetCapturedStderr());
  EXPECT_EQ(indices_in(storage / "misspelt"), (std::vector{0, 1, 2}));
  const std::string warning = "neither the report nor the validation of checkpoint_000000 has it as a number";
  EXPECT_NE(said.find(warning), std::string::npos) << said;
  EXPECT_EQ(said.find("neither", said.find(warning) + 1), std::string::npos) << "once: " << said;
  if (world().rank() == 0)
    detail::checkpoint::prune(*detail::storage::tier_of(storage / "misspelt"),
                              {.num_to_keep = 1, .checkpoint_score_attribute = "double"}, /*keep_pending=*/true);
  EXPECT_EQ(indices_in(storage / "misspelt"), std::vector{2}) << "with the right name";
}

/// At each checkpoint, by when others have gone: whether one is there for each row that waits.
class LooksForThoseThatWait final : public Callback {
 public:
  explicit LooksForThoseThatWait(fs::path run) : run_(std::move(run)) {}
  void on_checkpoint(const Checkpoint&) override {
    if (world().rank() > 0) return;
    for (const auto& row : detail::observe::History::read(run_)) {
      if (row.value("checkpoint_status", "") != pending) continue;
      EXPECT_TRUE(fs::exists(run_ / row.at("checkpoint_dir_name").get<std::string>())) << row;
    }
  }

 private:
  fs::path run_;
};

// Until then the file in its folder is all that there is of what was found.
TEST(Validation, AMeasuredOneStaysUntilItsRowHasIt) {
  if (spares() == 0) GTEST_SKIP() << "no rank is left over";
  const auto storage = test::shared_folder();
  const auto folder = storage / "untold";
  const auto validate = [](Session&, const Checkpoint& checkpoint) -> Config {
    return {{"score", 1.0 / static_cast<double>(number_in(checkpoint))}};
  };
  auto options = with("untold", validate, some_workers());
  options.run_config.checkpoint_config = {.num_to_keep = 1, .checkpoint_score_attribute = "score"};
  options.run_config.callbacks = {std::make_shared<LooksForThoseThatWait>(folder)};
  const auto [code, result] = run({storage, {}, options}, reporting(3, [&](Session& session, std::int64_t number) {
                                    if (number < 3) wait_for_validation(session, folder, number);
                                  }));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(statuses(result), Json({validated, validated, validated}));
  EXPECT_EQ(result->best_checkpoints.size(), 2u) << "the best and the newest";
}

TEST(Validation, WhatWasRolledBackTellsNoRow) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto options = with("back", doubling(calls));
  EXPECT_EQ(doubles(run({storage, {}, options}, reporting(2)).second), Json({2, 4}));
  const auto first = checkpoint_of(storage / "back", 1).string();
  const auto [code, result] = run({storage, {"--resume", first}, options}, [](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    state.restore();
    session.report({{"number", ++number}}, state);
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(statuses(result), Json({validated, "missing"}));
  EXPECT_EQ(doubles(result), Json({2, "missing"}));
}

TEST(Validation, ARefusedStepBackRemovesNothing) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "refused";
  std::vector<Call> calls;
  auto options = with("refused", doubling(calls));
  options.run_config.checkpoint_config.num_to_keep = 1;
  const auto fails = reporting(3, [](Session&, std::int64_t number) {
    if (number == 3) throw std::runtime_error("over");
  });
  EXPECT_EQ(run({storage, {}, options}, fails).first, 1);
  ASSERT_EQ(indices_in(folder), (std::vector{0, 1, 2})) << "all wait for their validation";
  // They are validated, and the job is killed before their rows are told.
  if (world().rank() == 0)
    for (const int number : {1, 2, 3})
      detail::checkpoint::write_validation(checkpoint_of(folder, number),
                                           {{"double", 2 * number}, {"checkpoint_status", validated}});
  const auto rows = column(detail::observe::History::read(folder), "number");
  world().barrier();
  const auto code =
      run({storage, {"--resume", checkpoint_of(folder, 1).string()}, options}, [](Session& session, const Config&) {
        std::int64_t other = 0;
        session.state({{"other", other}}).restore();
      }).first;
  EXPECT_EQ(code, 65);
  EXPECT_EQ(indices_in(folder), (std::vector{0, 1, 2}));
  EXPECT_EQ(column(detail::observe::History::read(folder), "number"), rows);
  world().barrier();
  const auto result = run({storage, {}, options}, reporting(4)).second;
  EXPECT_EQ(doubles(result), Json({2, 4, 6, 8}));
  EXPECT_EQ(indices_in(folder), std::vector{3});
}

TEST(Validation, AStartThatDoesNotTrainRemovesNothing) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  auto options = with("finished", doubling(calls));
  EXPECT_EQ(run({storage, {}, options}, reporting(3)).first, 0);
  options.run_config.checkpoint_config.num_to_keep = 1;
  EXPECT_EQ(run({storage, {}, options}, [](Session&, const Config&) { FAIL(); }).first, 0);
  EXPECT_EQ(indices_in(storage / "finished"), (std::vector{0, 1, 2}));
}

TEST(Validation, RowIsReplacedWhole) {
  const test::Folder folder;
  const auto number_of = [&](const char* name) {
    struct stat status {};
    EXPECT_EQ(::stat((folder / name).c_str(), &status), 0);
    return status.st_ino;
  };
  detail::observe::History history(folder.path());
  history.start({});
  history.append({{"training_iteration", 1}, {"loss", 0.5}, {"checkpoint_status", pending}});
  history.append({{"training_iteration", 2}, {"loss", 0.25}});
  const auto rows = number_of("result.json"), table = number_of("progress.csv");
  history.validated(1, {{"checkpoint_status", validated}, {"double", 2}});
  EXPECT_NE(number_of("result.json"), rows) << "another file, by a rename";
  EXPECT_NE(number_of("progress.csv"), table);
  const auto read = detail::observe::History::read(folder.path());
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0], Json({{"training_iteration", 1}, {"loss", 0.5}, {"checkpoint_status", validated}, {"double", 2}}));
  EXPECT_EQ(read[1], Json({{"training_iteration", 2}, {"loss", 0.25}}));
  EXPECT_EQ(detail::read_file(folder / "progress.csv"),
            "checkpoint_status,loss,training_iteration,double\nvalidated,0.5,1,2\n,0.25,2,\n");
  history.append({{"training_iteration", 3}, {"double", 6}});
  EXPECT_EQ(detail::observe::History::read(folder.path()).size(), 3u);
  const auto again = number_of("result.json");
  history.validated(1, {{"double", 2}});
  history.validated(7, {{"double", 2}});
  EXPECT_EQ(number_of("result.json"), again) << "nothing has changed";
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2) << "nothing is left behind";
}

TEST(Validation, FailureIsNulls) {
  const auto storage = test::shared_folder();
  const auto validate = [](Session& session, const Checkpoint& checkpoint) -> Config {
    const auto number = number_in(checkpoint);
    if (number == 2 && session.world_rank() == session.world_size() - 1) throw std::runtime_error("no such file");
    session.barrier();  // where the others wait
    return {{"double", 2 * number}, {"number", -number}};
  };
  const auto [code, result] = run({storage, {}, with("failure", validate)}, reporting(3));
  EXPECT_EQ(code, 0);
  EXPECT_FALSE(result->error);
  EXPECT_EQ(statuses(result), Json({validated, "validation_failed", validated}));
  EXPECT_EQ(doubles(result), Json({2, nullptr, 6}));
  EXPECT_EQ(column(result->metrics_history, "number"), Json({-1, 2, -3})) << "what was reported stays";
}

TEST(Validation, WhatItMustNotDoIsAFailure) {
  const auto storage = test::shared_folder();
  std::vector<std::string> refusals;
  const auto validate = [&](Session& session, const Checkpoint&) -> Config {
    double any = 0;
    auto state = session.state({{"any", any}});
    const std::function<void()> all[] = {[&] {
                                           session.report({{"loss", 1}});
                                         },
                                         [&] { state.restore(); }, [&] { session.should_stop(); },
                                         [&] { session.epochs(1); }, [&] { session.add_callback(nullptr); }};
    for (const auto& one : all) try {
        one();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage);
        refusals.push_back(error.what());
      }
    return {{"global_step", 1}};  // a name that every row has
  };
  const auto [code, result] = run({storage, {}, with("refused", validate)}, reporting(1));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(refusals.size(), 5u);
  for (const auto& text : refusals) EXPECT_NE(text.find("validates a checkpoint"), std::string::npos) << text;
  EXPECT_EQ(statuses(result), Json({"validation_failed"}));
  EXPECT_NE(result->metrics.at("global_step"), 1);
}

TEST(Validation, WhatCannotBeAskedForIsSaid) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, with("none", {})}, reporting(1));
  EXPECT_EQ(code, static_cast<int>(ExitCode::usage));
  EXPECT_NE(std::string(result->error->what()).find("TrainerOptions::validation"), std::string::npos);
  std::vector<Call> calls;
  const auto nothing = run({storage, {}, with("nothing", doubling(calls))}, [](Session& session, const Config&) {
    session.report({{"loss", 1}}, {.validation = true});
  });
  EXPECT_EQ(nothing.first, static_cast<int>(ExitCode::usage));
  EXPECT_NE(std::string(nothing.second->error->what()).find("no checkpoint to validate"), std::string::npos);
  EXPECT_TRUE(calls.empty());
  auto options = with("no_time", doubling(calls));
  options.validation.timeout = std::chrono::seconds(0);
  const auto no_time = test::run({storage, {}, options}, reporting(1));
  EXPECT_EQ(no_time.first, static_cast<int>(ExitCode::usage));
}

TEST(Validation, TheLongestTimesAreNoLimits) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  for (const std::chrono::milliseconds longest :
       {std::chrono::milliseconds::max(), std::chrono::milliseconds(std::chrono::years(1000))}) {
    auto options = with("years_" + std::to_string(longest.count()), doubling(calls), some_workers());
    options.validation.timeout = longest;
    options.torch_config.timeout = longest;
    const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config& config) {
      session.keep_alive(longest);
      EXPECT_EQ(session.mean(at::ones({})).item<double>(), 1);
      reporting(2)(session, config);
    });
    EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
    EXPECT_EQ(doubles(result), Json({2, 4}));
  }
}

TEST(Validation, TimeOutIsNulls) {
  // What a thread that is left behind looks at outlives the test.
  static std::atomic<bool> released = false;
  const auto storage = test::shared_folder();
  const auto folder = storage / "late";
  auto options = with(
      "late",
      [](Session&, const Checkpoint& checkpoint) -> Config {
        const auto number = number_in(checkpoint);
        while (number == 2 && !released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return {{"double", 2 * number}};
      },
      some_workers());
  options.validation.timeout = std::chrono::seconds(2);
  const auto [code, result] = run({storage, {}, options}, reporting(3, [&](Session& session, std::int64_t number) {
                                    if (spares() > 0 && number < 3) wait_for_validation(session, folder, number);
                                  }));
  // The thread that is left behind does not keep the run.
  std::vector<Call> calls;
  EXPECT_EQ(run({storage, {}, with("late", doubling(calls), some_workers())}, reporting(3)).first, 0);
  released = true;
  EXPECT_EQ(code, static_cast<int>(spares() > 0 ? ExitCode::done : ExitCode::stopped));
  const std::string error = result->error ? result->error->what() : "";
  EXPECT_EQ(error.find("a validation was given up; training is done, and some checkpoints are not validated yet") !=
                error.npos,
            spares() == 0)
      << error;
  // Those who trained can still validate; where all did it together, nobody can.
  EXPECT_EQ(statuses(result), Json({validated, "validation_timeout", spares() > 0 ? validated : pending}));
  EXPECT_EQ(doubles(result), Json({2, nullptr, spares() > 0 ? Json(6) : Json("missing")}));
}

/// Counts the threads that have used it and ended.
struct ThreadEnd {
  std::atomic<int>& ended;
  ~ThreadEnd() { ++ended; }
};

TEST(Validation, AThreadThatIsGivenUpIsNotInMpiWhenTheLaunchEnds) {
  if (world().size() == 1) GTEST_SKIP() << "there is no rank to wait for";
  static std::atomic<bool> released = false;
  static std::atomic<int> ended = 0;
  static std::atomic<std::uint64_t> seed = 0;
  static std::string text;
  const auto storage = test::shared_folder();
  auto options = with("together", [](Session& session, const Checkpoint&) -> Config {
    thread_local const ThreadEnd counted{ended};
    while (session.world_rank() == 0 && !released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (session.world_rank() == 0) seed = session.flags().seed;  // its launch is gone
    try {
      static_cast<void>(session.communicator().split(0));  // where the others wait
    } catch (const Error& error) {
      text = error.what();
      throw;
    }
    return {};
  });
  options.validation.timeout = std::chrono::milliseconds(500);
  run({storage, {"--seed", "7"}, options}, reporting(1));
  EXPECT_EQ(ended, world().rank() == 0 ? 0 : 1) << "only the thread that does not come back is left behind";
  if (world().rank() > 0) {  // its own wait may end first: it has the same limit
    EXPECT_TRUE(text.find("this rank has given up the work that they did together") != std::string::npos ||
                text.find("not finished within 0.5 s") != std::string::npos)
        << text;
  }
  released = true;
  while (world().rank() == 0 && seed == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(seed, world().rank() == 0 ? 7u : 0u);
}

TEST(Validation, WithOneThreadItTakesAsLongAsItTakes) {
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") == nullptr) GTEST_SKIP() << "MPI may be called by several threads";
  const auto storage = test::shared_folder();
  auto options = with("one_thread", [](Session& session, const Checkpoint& checkpoint) -> Config {
    if (session.world_rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    session.barrier();  // where the others wait
    return {{"double", 2 * number_in(checkpoint)}};
  });
  options.validation.timeout = std::chrono::milliseconds(100);
  const auto [code, result] = run({storage, {}, options}, reporting(2));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(doubles(result), Json({2, 4}));
}

TEST(Validation, ResumeQueuesAgain) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto fails = reporting(2, [](Session&, std::int64_t number) {
    if (number == 2) throw std::runtime_error("over");
  });
  const auto all = Json({validated, validated, validated});
  EXPECT_EQ(run({storage, {}, with("again", doubling(calls))}, fails).first, 1);
  EXPECT_TRUE(calls.empty());
  auto [code, result] = run({storage, {}, with("again", doubling(calls))}, reporting(3));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(statuses(result), all);
  EXPECT_EQ(doubles(result), Json({2, 4, 6}));
  EXPECT_EQ(calls.size(), 3u);

  // Also a run that is finished; and a row that a crash has left behind what was found.
  if (world().rank() == 0) {
    fs::remove(checkpoint_of(result->path, 1) / "validation.json");
    auto rows = detail::observe::History::read(result->path);
    std::ofstream file(result->path / "result.json");
    for (auto& row : rows) {
      row["checkpoint_status"] = pending;
      row.erase("double");
      file << row.dump() << "\n";
    }
  }
  world().barrier();
  std::tie(code, result) = run({storage, {}, with("again", doubling(calls))}, reporting(3));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(statuses(result), all);
  EXPECT_EQ(doubles(result), Json({2, 4, 6}));
  ASSERT_EQ(calls.size(), 4u);
  EXPECT_EQ(calls.back().first, 1);
}

TEST(Validation, WithoutTimeItIsLeftToTheNextStart) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto options = with("lead", doubling(calls));
  EXPECT_EQ(run({storage, {"--time-limit", "1"}, options}, reporting(9)).first, static_cast<int>(ExitCode::stopped));
  EXPECT_TRUE(calls.empty());
  const auto [code, result] = run({storage, {}, options}, reporting(2));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(doubles(result), Json({2, 4}));
}

TEST(Validation, AStopAfterTrainingLeavesTheRestToTheNextStart) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  bool asks = false;
  const auto asking = [&, doubles_it = doubling(calls)](Session& session, const Checkpoint& checkpoint) {
    asks = true;
    return doubles_it(session, checkpoint);
  };
  test::Job job{storage, {}, with("midway", asking)};
  job.options.run_config.checkpoint_config.num_to_keep = 2;
  const auto [code, result] = test::launch(job, [&](Launch& whole) {
    Launch launch(whole, {.ranks = detail::comm::make_separate_world(whole.communicator()),
                          .flags = whole.flags(),
                          .asked_to_stop = [&] { return asks; }});
    return TorchTrainer(launch, reporting(3), job.options).fit();
  });
  EXPECT_EQ(code, static_cast<int>(ExitCode::stopped));
  EXPECT_EQ(std::string(result->error->what()).find("given up"), std::string::npos) << result->error->what();
  const auto begun = calls.size();
  EXPECT_LT(begun, 3u);
  EXPECT_GT(list_checkpoints(storage / "midway").size(), 2u);
  job.options.validation.function = doubling(calls);
  job.flags = {"--time-limit", "1"};
  EXPECT_EQ(run(job, reporting(3)).first, static_cast<int>(ExitCode::retry)) << "it has not come further";
  job.flags = {};
  const auto again = run(job, reporting(3));
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(list_checkpoints(storage / "midway").size(), 2u);
  EXPECT_EQ(doubles(again.second), Json({2, 4, 6}));
}

TEST(Validation, AResultThatCannotBeWrittenIsLeftToTheNextStart) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto blocking = [&, doubles_it = doubling(calls)](Session& session, const Checkpoint& checkpoint) {
    if (session.world_rank() == 0) fs::create_directories(checkpoint.path() / "validation.json");
    return doubles_it(session, checkpoint);
  };
  const auto [code, result] = run({storage, {}, with("unwritten", blocking, some_workers())}, reporting(1));
  EXPECT_EQ(code, static_cast<int>(ExitCode::retry));
  EXPECT_NE(std::string(result->error->what()).find("the results of some validations could not be written"),
            std::string::npos)
      << result->error->what();
  EXPECT_EQ(statuses(result), Json({pending}));
  if (world().rank() == 0) fs::remove(checkpoint_of(result->path, 1) / "validation.json");
  world().barrier();
  const auto again = run({storage, {}, with("unwritten", doubling(calls), some_workers())}, reporting(1));
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(doubles(again.second), Json({2}));
}

TEST(Validation, WithoutAFunctionWhatWaitsForOneIsNotKept) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  auto options = with("forgotten", doubling(calls));
  options.run_config.checkpoint_config.num_to_keep = 1;
  EXPECT_EQ(run({storage, {"--time-limit", "1"}, options}, reporting(2)).first, static_cast<int>(ExitCode::stopped));
  const auto left = list_checkpoints(storage / "forgotten").back().index;
  options.validation = {};
  EXPECT_EQ(run({storage, {}, options},
                [](Session& session, const Config&) {
                  std::int64_t number = 0;
                  auto state = session.state({{"number", number}});
                  state.restore();
                  session.report({{"number", number}}, state);
                })
                .first,
            0);
  const auto kept = list_checkpoints(storage / "forgotten");
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_GT(kept.front().index, left);
}

TEST(Validation, WithoutTimeNothingBeginsBesideTraining) {
  if (spares() == 0) GTEST_SKIP() << "no rank is left over";
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto options = with("beside_lead", doubling(calls), some_workers());
  EXPECT_EQ(run({storage, {"--time-limit", "1"}, options}, reporting(9)).first, static_cast<int>(ExitCode::stopped));
  EXPECT_TRUE(calls.empty());
}

TEST(Validation, BeforeTheLeadTime) {
  if (spares() == 0) GTEST_SKIP() << "nobody knows how long one takes";
  const auto storage = test::shared_folder();
  const auto folder = storage / "stopped";
  std::vector<Call> calls;
  const auto train = reporting(9, [&](Session& session, std::int64_t number) {
    if (number == 1) wait_for_validation(session, folder, 1);
    if (session.world_rank() > 0 || number == 1) return;
    std::ofstream(folder / "stop") << "";
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // it is looked for once a second
  });
  const auto [code, result] =
      run({storage, {"--time-limit", "100000"}, with("stopped", doubling(calls), some_workers())}, train);
  EXPECT_EQ(code, static_cast<int>(ExitCode::stopped));
  const auto& rows = result->metrics_history;
  EXPECT_GE(rows.size(), 3u);
  for (const auto& row : rows) EXPECT_EQ(row.value("double", Json()), 2 * row.at("number").get<int>()) << row;
}

TEST(Validation, AfterARetry) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "retry";
  std::vector<Call> calls;
  auto options = with("retry", doubling(calls), some_workers());
  options.run_config.failure_config.max_failures = 1;
  bool failed = false;
  const auto train = reporting(4, [&](Session& session, std::int64_t number) {
    if (number == 4 && spares() > 0) wait_for_validation(session, folder, 3);
    if (number == 2 && !std::exchange(failed, true)) throw std::runtime_error("once");
  });
  const auto [code, result] = run({storage, {}, options}, train);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(doubles(result), Json({2, 4, 6, 8}));
  std::ranges::sort(calls);
  EXPECT_EQ(std::ranges::adjacent_find(calls, {}, &Call::first), calls.end()) << "each of them once";
  if (world().rank() >= some_workers()) {
    EXPECT_TRUE(std::ranges::find(calls, Call{3, spares()}) != calls.end()) << "those left over go on";
  }
}

TEST(Validation, AsyncSave) {
  const auto storage = test::shared_folder();
  const auto folder = storage / "async";
  std::vector<Call> calls;
  auto options = with("async", doubling(calls), some_workers());
  options.run_config.checkpoint_config.async_save = true;
  // Begun when it is committed, not when the next report finds that out.
  const auto train = reporting(2, [&](Session& session, std::int64_t number) {
    if (spares() > 0) wait_for_validation(session, folder, number);
  });
  const auto [code, result] = run({storage, {}, options}, train);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(doubles(result), Json({2, 4}));
  EXPECT_EQ(statuses(result), Json({validated, validated}));
}

TEST(Validation, ItsFileIsNotTheUsers) {
  const auto storage = test::shared_folder();
  std::vector<Call> calls;
  const auto first = run({storage, {}, with("first", doubling(calls))}, reporting(1));
  const auto [code, result] = run({storage, {}, with("second", {})}, [&](Session& session, const Config&) {
    session.report({{"loss", 1}}, *first.second->checkpoint);
  });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
  EXPECT_FALSE(fs::exists(result->checkpoint->path() / "validation.json"));
}

}  // namespace
}  // namespace muster::validation_test
