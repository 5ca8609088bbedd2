// Words of Ray Train that no other test shows, one by one; see ROWS.md. At any number of ranks.
#include "support/job.hpp"

#include "base/file.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::train_rows_test {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;
using test::line;
using test::main_with;
using test::run;
using test::shared_folder;
using test::world;

using Loop = std::function<void(Session&, const Config&)>;

TorchTrainerOptions named(std::string name, std::vector<std::shared_ptr<Callback>> callbacks = {}) {
  return {.run_config = {.name = std::move(name), .callbacks = std::move(callbacks)}};
}

/// Reports one of the losses after each epoch, with a state; `each` may throw then.
Loop losing(std::vector<double> losses, std::function<void(std::int64_t)> each = {}) {
  return [=](Session& session, const Config&) {
    std::int64_t done = 0;
    auto state = session.state({{"done", done}});
    state.restore();
    for (const auto epoch : session.epochs(static_cast<std::int64_t>(losses.size()))) {
      ++done;
      session.report({{"loss", losses[static_cast<std::size_t>(epoch)]}}, state);
      if (each) each(epoch);
    }
  };
}

std::size_t reports(const std::optional<Result>& result) { return result->metrics_history.size(); }

// --- Data ---

/// x less its mean over the training set, and how often that was learned.
class Center : public Preprocessor {
 public:
  void fit(const Dataset& dataset, const Communicator& communicator) override {
    ++fits;
    // Each rank checks its share.
    double sum = 0;
    for (auto i = std::int64_t{communicator.rank()}; i < dataset.count(); i += communicator.size()) {
      const std::vector<std::int64_t> sample{i};
      sum += dataset.read(sample)["x"].item<double>();
    }
    mean_ = communicator.all_reduce(sum) / static_cast<double>(dataset.count());
  }
  bool fitted() const override { return mean_.has_value(); }
  void transform(Batch& batch) const override { batch.set("x", batch["x"] - *mean_); }
  Json state() const override { return {{"mean", *mean_}}; }
  void load_state(const Json& state) override { mean_ = state.at("mean").get<double>(); }

  int fits = 0;

 private:
  std::optional<double> mean_;
};

// Fitted on "train", applied to every dataset, saved with the checkpoint and restored from it.
TEST(TrainRow, Preprocessor) {
  const auto storage = test::shared_folder();
  const auto go = [&](Dataset train, const std::shared_ptr<Center>& center, bool stops) {
    TorchTrainerOptions options{
        .run_config = {.name = "centered"},
        .datasets = {{"train", std::move(train)}, {"test", Dataset::from_items({{{"x", 10.0}}})}},
        .preprocessor = center};
    return run({storage, {}, options},
               [&](Session& session, const Config&) {
                 std::int64_t epochs = 0;
                 auto state = session.state({{"epochs", epochs}});
                 EXPECT_EQ(state.restore(), !stops);
                 for ([[maybe_unused]] auto epoch : session.epochs(2)) {
                   at::Tensor sum = at::zeros({1}, at::kDouble);
                   for (auto& batch : session.get_dataset_shard("train").iter_torch_batches())
                     sum += batch["x"].narrow(0, 0, batch.size()).sum();
                   if (stops) {
                     EXPECT_NEAR((session.mean(sum) * session.world_size()).item<double>(), 0, 1e-9);
                   }
                   for (auto& batch : session.get_dataset_shard("test").iter_torch_batches())
                     EXPECT_DOUBLE_EQ(batch["x"].item<double>(), 10 - 2.0);
                   ++epochs;
                   session.report({{"a", 1}}, state);
                   if (stops) throw std::runtime_error("the job ends");
                 }
                 EXPECT_EQ(epochs, 2);
               })
        .first;
  };
  const auto first = std::make_shared<Center>(), second = std::make_shared<Center>();
  EXPECT_EQ(go(Dataset::from_items({{{"x", 0.0}}, {{"x", 1.0}}, {{"x", 5.0}}}), first, true), 1);
  EXPECT_EQ(first->fits, 1);
  // Another training set would give another mean; the run goes on with the mean that it had.
  EXPECT_EQ(go(Dataset::from_items({{{"x", 100.0}}, {{"x", 1.0}}, {{"x", 5.0}}}), second, false), 0);
  EXPECT_EQ(second->fits, 0);
  EXPECT_EQ(second->state(), first->state());
}

// --- Callbacks ---

TEST(TodayRow, EarlyStopping) {
  const auto storage = shared_folder();
  const std::vector<double> losses{5, 4, 3.95, 4, std::nan(""), 1, 1, 1};
  const auto with = [&](std::string name, const EarlyStoppingOptions& options) {
    return named(std::move(name), {early_stopping(options)});
  };
  const auto [code, result] =
      run({storage, {}, with("early", {.metric = "loss", .mode = ScoreOrder::min, .patience = 3})}, losing(losses));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(reports(result), 8u) << "each of 4, NaN, 1 and 1 after the best is one of two in a row at most";
  const auto delta =
      run({storage, {}, with("delta", {.metric = "loss", .mode = ScoreOrder::min, .patience = 3, .min_delta = 0.1})},
          losing(losses))
          .second;
  EXPECT_EQ(reports(delta), 5u) << "3.95 is not better by more than 0.1";
  const auto most =
      run({storage, {}, with("most", {.metric = "loss", .mode = ScoreOrder::max, .patience = 1})}, losing(losses))
          .second;
  EXPECT_EQ(reports(most), 2u);

  // Across a job that breaks off: best and patience go on.
  const auto broken =
      run({storage, {}, with("again", {.metric = "loss", .mode = ScoreOrder::min, .patience = 2, .min_delta = 0.1})},
          losing(losses, [](std::int64_t epoch) {
            if (epoch == 2) throw std::runtime_error("after one that was no better");
          }));
  EXPECT_EQ(broken.first, 1);
  const auto again =
      run({storage, {}, with("again", {.metric = "loss", .mode = ScoreOrder::min, .patience = 2, .min_delta = 0.1})},
          losing(losses));
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(reports(again.second), 4u) << "as without the break";
  // With more patience it goes on where it is told to, as it is finished.
  auto more = with("again", {.metric = "loss", .mode = ScoreOrder::min, .patience = 20});
  EXPECT_EQ(reports(run({storage, {}, more}, losing(losses)).second), 4u) << "it is finished";
  const auto longer = with("again", {.metric = "loss", .mode = ScoreOrder::min, .patience = 4, .min_delta = 5});
  EXPECT_EQ(reports(run({storage, {"--resume", "must"}, longer}, losing(losses)).second), 6u)
      << "it waits for two more";
  more.train_loop_config = {{"more", true}};
  EXPECT_EQ(reports(run({storage, {}, more}, losing(losses)).second), 8u);

  // A report without the metric does not count.
  const auto other =
      run({storage, {}, with("other", {.metric = "val_loss", .mode = ScoreOrder::min, .patience = 1})}, losing(losses))
          .second;
  EXPECT_EQ(reports(other), 8u);
  EXPECT_THROW(early_stopping({}), Error);
  EXPECT_THROW(early_stopping({.metric = "loss", .patience = 1}), Error) << "it has no mode";
  EXPECT_THROW(early_stopping({.metric = "loss", .mode = ScoreOrder::min, .patience = -1}), Error);
  EXPECT_THROW(early_stopping({.metric = "loss", .mode = ScoreOrder::min, .min_delta = -1}), Error);
}

TEST(TodayRow, LearningRateMonitorOfGroups) {
  const auto result = run({shared_folder(), {}, named("groups")}, [](Session& session, const Config&) {
                        torch::nn::Linear a(1, 1), b(1, 1);
                        torch::optim::SGD optimizer({torch::optim::OptimizerParamGroup(a->parameters()),
                                                     torch::optim::OptimizerParamGroup(b->parameters())},
                                                    0.5);
                        optimizer.param_groups()[1].options().set_lr(0.25);
                        session.add_callback(learning_rate_monitor(optimizer, {.name = "rate"}));
                        session.report({});
                      }).second;
  EXPECT_EQ(result->metrics.at("rate_0"), 0.5);
  EXPECT_EQ(result->metrics.at("rate_1"), 0.25);
}

TEST(TodayRow, TimeBudget) {
  const auto storage = shared_folder();
  const auto over = run({storage, {}, named("over", {time_budget(std::chrono::milliseconds(0))})}, losing({1, 1, 1}));
  EXPECT_EQ(over.first, 0);
  EXPECT_EQ(reports(over.second), 1u);
  EXPECT_EQ(reports(run({storage, {}, named("ample", {time_budget(hours(1))})}, losing({1, 1, 1})).second), 3u);

  // From an earlier job, which has taken more time than that.
  const auto train = [](bool fails) {
    return [fails](Session& session, const Config&) {
      std::int64_t n = 0;
      auto state = session.state({{"n", n}});
      state.restore();
      if (fails) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      while (n < 5) {
        session.report({{"n", ++n}}, state);
        if (fails) throw std::runtime_error("the first job");
      }
    };
  };
  EXPECT_EQ(run({storage, {}, named("again")}, train(true)).first, 1);
  const auto again = run({storage, {}, named("again", {time_budget(std::chrono::milliseconds(200))})}, train(false));
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(reports(again.second), 2u) << "its time counts";
}

// --- Result ---

TEST(TodayRow, ResultFromPath) {
  const auto storage = shared_folder();
  auto options = named("whole");
  options.run_config.checkpoint_config = {.checkpoint_score_attribute = "loss",
                                          .checkpoint_score_order = ScoreOrder::min};
  const auto fitted = run({storage, {}, options}, losing({3, 1, 2})).second;
  EXPECT_EQ(fitted->path, storage / "whole");
  EXPECT_EQ(fitted->metrics.at("loss"), 2) << "the last one's, not the best";
  ASSERT_TRUE(fitted->checkpoint);
  EXPECT_EQ(fitted->checkpoint->to_dict().values.at("done"), 3);
  EXPECT_FALSE(fitted->error);
  ASSERT_EQ(fitted->metrics_history.size(), 3u);
  EXPECT_EQ(fitted->metrics_history.front().at("loss"), 3);
  world().barrier();
  const auto read = Result::from_path(storage / "whole/");
  EXPECT_EQ(read.path, fitted->path);
  EXPECT_EQ(read.metrics, fitted->metrics);
  EXPECT_EQ(read.metrics_history, fitted->metrics_history);
  EXPECT_EQ(read.checkpoint->path(), fitted->checkpoint->path());
  EXPECT_FALSE(read.error);
  ASSERT_EQ(read.best_checkpoints.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.best_checkpoints[i].first.path(), fitted->best_checkpoints[i].first.path());
    EXPECT_EQ(read.best_checkpoints[i].second, fitted->best_checkpoints[i].second);
  }
  EXPECT_EQ(read.best_checkpoints.front().second.at("loss"), 1);

  const auto failed =
      run({storage, {}, named("failed")}, [](Session&, const Config&) { throw std::runtime_error("as told"); }).second;
  world().barrier();
  EXPECT_STREQ(Result::from_path(storage / "failed").error->what(), failed->error->what());
  EXPECT_EQ(Result::from_path(storage / "failed").exit_code(), ExitCode::user_error);
  for (const auto& none : {storage, storage / "nothing"}) {
    try {
      Result::from_path(none);
      ADD_FAILURE() << none;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
    }
  }
  world().barrier();
}

TEST(TodayRow, GetBestCheckpoint) {
  const auto storage = shared_folder();
  const auto losses = [](const std::optional<Result>& result) {
    Json all = Json::array();
    for (const auto& [checkpoint, metrics] : result->best_checkpoints) all.push_back(metrics.at("loss"));
    return all;
  };
  const auto result = run({storage, {}, named("best")}, losing({3, 1, std::nan(""), 2})).second;
  EXPECT_EQ(losses(result), Json({2, nullptr, 1, 3})) << "all, the newest first";
  EXPECT_EQ(result->get_best_checkpoint("loss", ScoreOrder::min)->path(), storage / "best/checkpoint_000001");
  EXPECT_EQ(result->get_best_checkpoint("loss", ScoreOrder::max)->path(), storage / "best/checkpoint_000000");
  EXPECT_THROW(static_cast<void>(result->get_best_checkpoint("accuracy", ScoreOrder::max)), Error);
  EXPECT_FALSE(Result().get_best_checkpoint("loss", ScoreOrder::min)) << "there are none";
  auto pruned = named("pruned");
  pruned.run_config.checkpoint_config.num_to_keep = 2;
  const auto two = run({storage, {}, pruned}, losing({1, 3, 2})).second;
  EXPECT_EQ(two->get_best_checkpoint("loss", ScoreOrder::min)->path(), storage / "pruned/checkpoint_000002")
      << "of those that are there";
  EXPECT_EQ(losses(two), Json({2, 3}));
}

TEST(TodayRow, MetricsTable) {
  const auto result = run({shared_folder(), {}, named("table")}, [](Session& session, const Config&) {
                        session.report({{"loss", 2}});
                        session.report({{"loss", 1}, {"accuracy", 0.5}, {"word", "x"}});
                      }).second;
  const auto table = result->metrics_table();
  ASSERT_EQ(table.rows.size(), 2u);
  for (const auto& row : table.rows) EXPECT_EQ(row.size(), table.columns.size());
  EXPECT_EQ(table.column("loss"), (std::vector<double>{2, 1}));
  EXPECT_TRUE(std::isnan(table.column("accuracy")[0]));
  EXPECT_EQ(table.column("accuracy")[1], 0.5);
  EXPECT_TRUE(std::isnan(table.column("word")[1]));
  EXPECT_THROW(table.column("none"), Error);
  std::ifstream csv(result->path / "progress.csv");
  std::string header, names;
  std::getline(csv, header);
  for (const auto& column : table.columns) names += (names.empty() ? "" : ",") + column;
  EXPECT_EQ(header, names);
  EXPECT_TRUE(Result().metrics_table().columns.empty());
}

TEST(TodayRow, ReturnValue) {
  const auto storage = shared_folder();
  const auto fit = [&](std::string name, TrainLoop loop, std::vector<std::shared_ptr<Callback>> callbacks = {}) {
    return test::launch({storage}, [&](Launch& launch) {
      return TorchTrainer(launch, loop, named(std::move(name), std::move(callbacks))).fit();
    });
  };
  int calls = 0;
  const TrainLoop returning = [&](Session& session) {
    ++calls;
    return Json{{"rank", session.world_rank()}, {"words", {"a", "b"}}};
  };
  const Json expected{{"rank", 0}, {"words", {"a", "b"}}};
  EXPECT_EQ(fit("kept", returning).second->return_value, expected) << "rank 0's";
  EXPECT_EQ(fit("kept", returning).second->return_value, expected) << "of a run that is finished";
  EXPECT_EQ(calls, 1);
  world().barrier();
  EXPECT_EQ(Result::from_path(storage / "kept").return_value, expected);

  // Any value that converts to JSON, with and without the configuration.
  EXPECT_EQ(fit("number", [](Session&, const Config&) { return 0.5; }).second->return_value, 0.5);
  EXPECT_EQ(fit("text", [](Session&) { return "done"; }).second->return_value, "done");
  EXPECT_TRUE(fit("nothing", [](Session&) {}).second->return_value.is_null());
  const std::function<void(Session&, const Config&)> function = [](Session&, const Config&) {};
  EXPECT_TRUE(fit("function", function).second->return_value.is_null());
  EXPECT_TRUE(fit("nan", [](Session&) { return std::nan(""); }).second->return_value.is_null());
  EXPECT_EQ(fit("bytes", [](Session&) { return std::string("a\xff"); }).first, 0) << "no text";

  const auto failed = fit("failed", [](Session& session) -> Json {
    if (session.world_rank() == session.world_size() - 1) throw std::runtime_error("as told");
    return 1;
  });
  EXPECT_EQ(failed.first, 1);
  EXPECT_TRUE(failed.second->return_value.is_null());
  world().barrier();
  EXPECT_TRUE(Result::from_path(storage / "failed").return_value.is_null());
  const auto ended = fit("ended",
                         [](Session& session) {
                           return session.report({{"loss", 1}}), Json(1);
                         },
                         {time_budget(std::chrono::milliseconds(0))});
  EXPECT_EQ(ended.first, 0);
  EXPECT_TRUE(ended.second->return_value.is_null()) << "it has not returned";
}

// --- Checkpoints ---

TEST(TodayRow, GetAllReportedCheckpoints) {
  for (const bool async : {false, true}) {
    auto options = named(async ? "async" : "plain");
    options.run_config.checkpoint_config = {.num_to_keep = 2, .async_save = async};
    const auto code = run({shared_folder(), {}, options}, [](Session& session, const Config&) {
                        EXPECT_TRUE(session.get_all_reported_checkpoints().empty());
                        std::int64_t mine = session.world_rank();
                        const auto state = session.state({{"mine", per_rank(mine)}});
                        for (int i = 0; i < 3; ++i) session.report({{"i", i}}, state);
                        const auto all = session.get_all_reported_checkpoints();
                        ASSERT_EQ(all.size(), 2u) << "the others are pruned";
                        for (int i = 0; i < 2; ++i) {
                          const auto& [checkpoint, metrics, status] = all[static_cast<std::size_t>(i)];
                          EXPECT_EQ(metrics.at("i"), i + 1);
                          EXPECT_EQ(status, CheckpointStatus::committed);
                          std::int64_t back = -1;
                          checkpoint.load("mine", per_rank(back));
                          EXPECT_EQ(back, mine);
                        }
                        session.barrier();
                      }).first;
    EXPECT_EQ(code, 0);
  }
}

/// The target of the link of that name in the run's folder; empty if there is none.
std::string named_by(const fs::path& run, const std::string& name) {
  std::error_code none;
  return fs::read_symlink(run / name, none).string();
}

TEST(TodayRow, CheckpointDirName) {
  const auto storage = shared_folder();
  for (const bool async : {false, true}) {
    auto options = named(async ? "async" : "plain");
    options.run_config.checkpoint_config = {.num_to_keep = 1, .async_save = async};
    const auto train = [&](Session& session, const Config&) {
      std::int64_t epoch = 0;
      auto state = session.state({{"epoch", epoch}});
      session.report({{"a", 1}}, state, {.checkpoint_name = "best"});
      session.report({{"a", 2}}, state, {.checkpoint_name = "best"});
      session.report({{"a", 3}}, state, {.checkpoint_name = "last"});
      for (const std::string name : {"a/b",
                                     ".hidden",
                                     "checkpoint_000009",
                                     "checkpoint_best",
                                     "result.json",
                                     "logs",
                                     "artifacts",
                                     "stop",
                                     "trial.json",
                                     "trial_00003",
                                     "sweep.json",
                                     "report.html",
                                     "trace_11_20.json",
                                     "status.json",
                                     "steps_back.json",
                                     "passes.json",
                                     "fast_tier.json",
                                     "validation.json",
                                     "events.out.tfevents.1",
                                     "a\nb",
                                     "a\xff"})
        try {
          session.report({{"a", 3}}, state, {.checkpoint_name = name});
          ADD_FAILURE() << name;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
        }
    };
    const auto [code, result] = run({storage, {}, options}, train);
    EXPECT_EQ(code, 0);
    world().barrier();
    const auto& path = result->path;
    EXPECT_EQ(named_by(path, "last"), "checkpoint_000002") << "relative";
    EXPECT_EQ(Checkpoint::from_directory(path / "last").to_dict().values.at("epoch"), 0);
    EXPECT_EQ(named_by(path, "best"), "") << "gone with what it names";
    EXPECT_EQ(result->metrics.at("checkpoint_dir_name"), "checkpoint_000002");
    EXPECT_EQ(result->metrics.at("checkpoint_name"), "last");
    world().barrier();
  }
  // A name that another file has is a warning.
  const auto code = run({storage, {}, named("taken")}, [](Session& session, const Config&) {
                      fs::create_directories(session.artifacts().parent_path() / "mine");
                      session.barrier();
                      session.report({{"a", 1}}, session.state({}), {.checkpoint_name = "mine"});
                    }).first;
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(fs::is_directory(fs::symlink_status(storage / "taken/mine")));
  EXPECT_TRUE(fs::exists(storage / "taken/checkpoint_000000"));
}

TEST(TodayRow, FromDictTakesValues) {
  const std::vector<std::string> classes{"cat", "dog"};
  const double rate = 0.5;
  std::int64_t steps = 7;
  std::vector<Checkpoint> all;
  for (int epoch = 0; epoch < 2; ++epoch)
    all.push_back(Checkpoint::from_dict({{"epoch", epoch},
                                         {"rate", rate},
                                         {"steps", steps},
                                         {"twice", 2 * steps},
                                         {"classes", classes},
                                         {"note", "a text"},
                                         {"options", Json{{"lr", rate}}},
                                         {"weights", at::ones({2})}}));
  const auto back = all[1].to_dict();
  EXPECT_EQ(back.values.at("epoch"), 1);
  EXPECT_EQ(back.values.at("rate"), 0.5);
  EXPECT_EQ(back.values.at("twice"), 14);
  EXPECT_EQ(back.values.at("classes"), Json(classes));
  EXPECT_EQ(back.values.at("note"), "a text");
  EXPECT_TRUE(at::equal(back.tensors.at("weights"), at::ones({2})));
  std::int64_t epoch = -1;
  all[1].load("epoch", epoch);
  EXPECT_EQ(epoch, 1);
  EXPECT_TRUE(Checkpoint::from_dict({}).to_dict().tensors.empty());
}

// --- The run ---

TEST(TodayRow, LoggingConfig) {
  const auto storage = shared_folder();
  const auto logs = [&](const std::string& name) {
    world().barrier();
    std::string all;
    for (int rank = 0; rank < 4; ++rank) {
      const auto file = storage / name / "logs" / ("rank_0000" + std::to_string(rank) + ".log");
      if (fs::exists(file)) all += "[" + std::to_string(rank) + "]" + detail::read_file(file);
    }
    world().barrier();
    return all;
  };
  const auto fit = [&](std::string name, const LoggingConfig& logging, std::vector<std::string> flags = {}) {
    auto options = named(name);
    options.run_config.logging_config = logging;
    flags.insert(flags.end(), {"--storage", storage.string(), "--progress", "none"});  // and no --log-level
    return main_with(flags, [&](Launch& launch) {
      return TorchTrainer(
                 launch, [](Session&) {}, options)
          .fit();
    });
  };
  EXPECT_EQ(fit("quiet", {.level = "warn"}), 0);
  EXPECT_EQ(logs("quiet").find("worker"), std::string::npos) << "no line of what begins";
  EXPECT_EQ(fit("loud", {.level = "warn"}, {"--log-level", "info"}), 0);
  EXPECT_NE(logs("loud").find("worker"), std::string::npos) << "the flag wins";
  EXPECT_EQ(fit("none", {.level = "warn", .file = false}), 0);
  EXPECT_EQ(logs("none"), "");
  EXPECT_EQ(fit("first", {.level = "warn", .per_rank = false}), 0);
  EXPECT_EQ(logs("first").find("[1]"), std::string::npos);
  EXPECT_EQ(logs("first").find("[0]"), 0u);
  EXPECT_EQ(fit("wrong", {.level = "shout"}), static_cast<int>(ExitCode::usage));
  EXPECT_FALSE(fs::exists(storage / "wrong"));
  world().barrier();
}

TEST(TodayRow, Preemption) {
  const auto storage = shared_folder();
  const auto ask = [&](const Session& session) {
    if (session.world_rank() == 0) std::ofstream(storage / session.trial_name() / "stop") << "please";
  };
  const auto [code, result] = run({storage, {}, named("asked")}, [&](Session& session, const Config&) {
    std::int64_t step = 0;
    auto state = session.state({{"step", step}});
    ask(session);
    EXPECT_TRUE(session.preemption().asked) << "on every worker";
    session.report({{"step", 1}}, state);
    ADD_FAILURE() << "that was the boundary";
  });
  EXPECT_EQ(code, static_cast<int>(ExitCode::stopped));
  int returned = 0;
  for (const int expected : {static_cast<int>(ExitCode::stopped), 0}) {
    const auto again = run({storage, {}, named("again")}, [&](Session& session, const Config&) {
      std::int64_t step = 0;
      auto state = session.state({{"step", step}});
      if (state.restore()) return;
      session.report({{"step", ++step}}, state);
      ask(session);
      while (!session.preemption().asked) continue;  // the file is looked for once a second
      ++returned;
    });
    EXPECT_EQ(again.first, expected) << "who returns then is not finished, and goes on when it is started again";
  }
  EXPECT_EQ(returned, 1);
  const auto unsaved = run({storage, {}, named("unsaved")}, [&](Session& session, const Config&) {
    ask(session);
    EXPECT_TRUE(session.preemption().asked);
  });
  EXPECT_EQ(unsaved.first, static_cast<int>(ExitCode::retry));
  const auto left_alone = run({storage, {}, named("left_alone")}, [&](Session& session, const Config&) {
    EXPECT_FALSE(session.preemption().asked);
    EXPECT_FALSE(session.preemption().time_left);
  });
  EXPECT_EQ(left_alone.first, 0);
  const auto limited = run({storage, {"--time-limit", "1h"}, named("limited")}, [](Session& session, const Config&) {
    const auto told = session.preemption();
    ASSERT_TRUE(told.time_left);
    EXPECT_LE(*told.time_left, hours(1));
    EXPECT_GT(*told.time_left, std::chrono::minutes(50));
    EXPECT_EQ(session.broadcast_from_rank_zero(told.time_left->count()), told.time_left->count()) << "alike";
  });
  EXPECT_EQ(limited.first, 0);
}

TEST(TodayRow, BroadcastFromRankZero) {
  EXPECT_EQ(run({shared_folder(), {}, named("broadcast")},
                [](Session& session, const Config&) {
                  const Json mine{{"rank", session.world_rank()}, {"list", {1, 2.5, "x", nullptr}}};
                  const Json first{{"rank", 0}, {"list", {1, 2.5, "x", nullptr}}};
                  EXPECT_EQ(session.broadcast_from_rank_zero(mine), first);
                  EXPECT_EQ(session.broadcast_from_rank_zero(session.world_rank() + 5), 5);
                  const auto bytes = Json::binary({1, 2, 255}, /*subtype=*/7);
                  EXPECT_EQ(session.broadcast_from_rank_zero(bytes), bytes);
                  const auto nothing = session.broadcast_from_rank_zero(std::nan(""));
                  EXPECT_TRUE(std::isnan(nothing.get<double>()));
                })
                .first,
            0);
}

TEST(TodayRow, Artifacts) {
  const auto storage = shared_folder();
  EXPECT_EQ(run({storage, {}, named("art")},
                [&](Session& session, const Config&) {
                  EXPECT_FALSE(fs::exists(storage / "art/artifacts"));
                  session.barrier();
                  EXPECT_EQ(session.artifacts(), storage / "art/artifacts");
                  std::ofstream(session.artifacts() / std::to_string(session.world_rank())) << "mine";
                  session.report({{"a", 1}}, session.state({}));
                })
                .first,
            0);
  world().barrier();
  EXPECT_TRUE(fs::exists(storage / "art/artifacts" / std::to_string(world().rank())));
  world().barrier();
}

TEST(TodayRow, NumWorkersFromTo) {
  const int ranks = world().size();
  const auto workers = [&](const ScalingConfig& asked, std::vector<std::string> flags = {}) {
    auto options = named("run");
    options.scaling_config = asked;
    int seen = 0;
    const auto code = run({shared_folder(), std::move(flags), options}, [&](Session& session, const Config&) {
                        seen = session.world_size();
                        if (asked.threads_per_worker) {
                          EXPECT_EQ(at::get_num_threads(), *asked.threads_per_worker);
                        }
                      }).first;
    const auto most = static_cast<int>(world().all_reduce(std::int64_t{seen}, ReduceOp::max));
    EXPECT_EQ(seen > 0, world().rank() < most) << "the others wait";
    return std::pair(code, most);
  };
  EXPECT_EQ(workers({.num_workers = {1, 2}}), std::pair(0, std::min(2, ranks)));
  EXPECT_EQ(workers({.num_workers = {1, 64}}), std::pair(0, ranks)) << "as many as there are";
  EXPECT_EQ(workers({.num_workers = {ranks, ranks}}), std::pair(0, ranks));
  EXPECT_EQ(workers({}), std::pair(0, ranks)) << "all";
  EXPECT_EQ(workers({.num_workers = ranks, .threads_per_worker = 2}), std::pair(0, ranks));
  EXPECT_EQ(workers({.num_workers = {2, 64}}, {"--workers", "1"}), std::pair(0, 1)) << "the flag wins";
  const int usage = static_cast<int>(ExitCode::usage);
  for (const NumWorkers& more : {NumWorkers(ranks + 1), NumWorkers(ranks + 1, 64), NumWorkers(0, 2), NumWorkers(3, 2)})
    EXPECT_EQ(workers({.num_workers = more}).first, usage);
}

// --- The user's own trainers ---

/// A trainer whose setup() makes its data, and which splits all of them unless it is told otherwise.
struct SplitsAll : TorchTrainer {
  using TorchTrainer::TorchTrainer;
  void setup() override {
    for (const char* name : {"train", "valid"})
      options_.datasets.emplace(name, Dataset::from_tensors({{"x", at::ones({6 * launch().size(), 1})}}));
  }
  DataConfig default_dataset_config() const override { return {.split_all = true}; }
};
/// The same with the default of every trainer.
struct SplitsTrain : SplitsAll {
  using SplitsAll::SplitsAll;
  DataConfig default_dataset_config() const override { return TorchTrainer::default_dataset_config(); }
};

TEST(TodayRow, DefaultDatasetConfig) {
  const int ranks = world().size();
  using Seen = std::pair<std::int64_t, std::int64_t>;
  const auto rows = [&]<class Trainer>(std::type_identity<Trainer>, const DataConfig& config) {
    Seen seen;
    TorchTrainerOptions options = named("run");
    options.dataset_config = config;
    const auto train = [&](Session& session) {
      const auto count = [&](const std::string& name) {
        const auto shard = session.get_dataset_shard(name);
        EXPECT_EQ(shard.count(), 6 * ranks) << "of the whole dataset";
        std::int64_t samples = 0;
        for (const auto& batch : shard.iter_torch_batches({.batch_size = 1, .training = false}))
          samples += batch.size();
        return samples;
      };
      seen = {count("train"), count("valid")};
    };
    const auto fit = [&](Launch& launch) { return Trainer(launch, train, options).fit(); };
    EXPECT_EQ(test::launch({shared_folder()}, fit).first, 0);
    return seen;
  };
  const std::type_identity<SplitsAll> all;
  EXPECT_EQ(rows(all, {}), Seen(6, 6)) << "the trainer's";
  EXPECT_EQ(rows(all, {.datasets_to_split = {"train"}}), Seen(6, 6 * ranks)) << "a list is all that is split";
  EXPECT_EQ(rows(all, {.datasets_to_split = {}}), Seen(6 * ranks, 6 * ranks)) << "nothing";
  EXPECT_EQ(rows(all, {.split_all = false}), Seen(6, 6 * ranks));
  const std::type_identity<SplitsTrain> usual;
  EXPECT_EQ(rows(usual, {}), Seen(6, 6 * ranks)) << "\"train\" is split";
  EXPECT_EQ(rows(usual, {.datasets_to_split = {"valid"}}), Seen(6 * ranks, 6));
  EXPECT_EQ(rows(usual, {.datasets_to_split = {"train", "valid"}}), Seen(6, 6));
  EXPECT_EQ(rows(usual, {.split_all = true}), Seen(6, 6));
  const auto nothing = [](Session&) {};
  main_with({}, [&](Launch& launch) {
    const SplitsAll trainer(launch, nothing, {.dataset_config = {.datasets_to_split = {"valid"}}});
    EXPECT_EQ(trainer.get_dataset_config().datasets_to_split, std::vector<std::string>{"valid"});
    EXPECT_FALSE(trainer.get_dataset_config().split_all.value_or(false));
    EXPECT_TRUE(SplitsAll(launch, nothing).get_dataset_config().split_all.value());
  });
}

TEST(TodayRow, RestoreOfOnesOwn) {
  /// A trainer whose function is its own, and which can be restored.
  struct Counting : DataParallelTrainer {
    explicit Counting(Launch& launch, TrainerOptions options = {})
        : DataParallelTrainer(
              launch,
              [](Session& session, const Config& config) {
                std::int64_t done = 0;
                auto state = session.state({{"done", done}});
                state.restore();
                while (done < config.at("until")) {
                  ++done;
                  session.report({{"done", done}}, state);
                }
                return done;
              },
              std::move(options)) {}
    static Counting restore(Launch& launch, const fs::path& path, TrainerOptions options = {}) {
      return Counting(launch, restored_options(path, std::move(options)));
    }
  };
  const auto storage = shared_folder();
  const auto first = test::launch({storage}, [](Launch& launch) {
    return Counting(launch,
                    {.train_loop_config = {{"until", 2}}, .run_config = {.name = "count"}, .metadata = {{"a", 1}}})
        .fit();
  });
  EXPECT_EQ(first.second->return_value, 2);
  const auto again = test::launch({storage}, [&](Launch& launch) {
    EXPECT_TRUE(Counting::can_restore(storage / "count"));
    return Counting::restore(launch, storage / "count", {.train_loop_config = {{"until", 5}}}).fit();
  });
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(again.second->return_value, 5);
  EXPECT_EQ(again.second->metrics_history.size(), 5u) << "it went on";
  world().barrier();
  EXPECT_EQ(Json::parse(detail::read_file(storage / "count/params.json")).at("metadata").at("a"), 1);
  EXPECT_THROW(restored_options(storage / "none"), Error);
  world().barrier();
}

// --- Trials of a sweep ---

void fit_line(Session& session, const Config& config) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(net->parameters(), config.at("lr").get<double>());
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    Mean loss;
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = 16})) {
      optimizer.zero_grad();
      auto l = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }
    session.report({{"loss", loss}}, state);
  }
}

/// A trainer of a user's own, whose setup() decides for each trial.
struct OwnTrainer : TorchTrainer {
  using TorchTrainer::TorchTrainer;
  void setup() override {
    sizes.push_back(launch().size());
    options_.metadata = {{"lr", options_.train_loop_config.at("lr")}};
  }
  std::vector<int> sizes;
};

TEST(TrainRow, AsTrainable) {
  const int together = std::min(2, world().size());
  const auto storage = shared_folder();
  std::optional<SweepResult> sweep;
  const auto train_all = [&](Launch& launch) {
    OwnTrainer trainer(launch, fit_line,
                       {.train_loop_config = {{"lr", 0.5}, {"epochs", 4}}, .datasets = {{"train", line()}}});
    sweep = Sweep(launch, trainer.as_trainable(),
                  {.space = {{"lr", grid({0.001, 0.1, 0.01})}},
                   .ranks_per_trial = together,
                   .metric = "loss",
                   .mode = ScoreOrder::min})
                .fit();
    for (const int size : trainer.sizes) EXPECT_EQ(size, together) << "launch() is the trial's";
    // Afterwards the trainer is unchanged on all ranks, and its run is beside the trials.
    const auto result = trainer.fit();
    EXPECT_EQ(trainer.sizes.back(), world().size());
    return result;
  };
  EXPECT_EQ(test::launch({storage, {"--name", "sweep"}}, train_all).first, 0);
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials.size(), 3u);
  const auto best = sweep->best();
  ASSERT_TRUE(best);
  EXPECT_EQ(best->config, Json({{"lr", 0.1}}));
  EXPECT_EQ(best->metrics.at("training_iteration"), 4);
  ASSERT_TRUE(best->checkpoint);
  EXPECT_EQ(best->checkpoint->get_metadata(), Json({{"lr", 0.1}})) << "setup() saw the trial's settings";

  // The same training on as many ranks alone gives the same loss.
  TorchTrainerOptions options = named("alone");
  options.train_loop_config = {{"lr", 0.1}, {"epochs", 4}};
  options.datasets = {{"train", line()}};
  const auto alone = run({storage, {"--workers", std::to_string(together)}, options}, fit_line).second;
  EXPECT_EQ(alone->metrics.at("loss"), best->metrics.at("loss"));
}

/// An operator that fits a line, and counts the batches that it trains on in this process.
struct Line : TrainingOperator {
  void setup(const Config& config) override {
    torch::nn::Linear net(1, 1);
    const auto lr = config.at("lr").get<double>();
    if (lr < 0) throw std::runtime_error("no such rate");
    register_training(Components{
        .models = net, .optimizers = torch::optim::SGD(net->parameters(), lr), .criterion = torch::nn::MSELoss()});
    register_data({line(), {.batch_size = 4}}, OperatorLoader(line(), {.batch_size = 10}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    ++batches;
    return TrainingOperator::train_batch(batch, info);
  }
  static inline int batches = 0;
};

std::optional<SweepResult> sweep_over(const fs::path& storage, const Trainable& trainable, SweepOptions options) {
  options.ranks_per_trial = std::min(2, world().size());
  std::optional<SweepResult> sweep;
  const std::vector<std::string> flags{"--storage",  storage.string(), "--name",      "operators",
                                       "--progress", "none",           "--log-level", "error"};
  main_with(flags, [&](Launch& launch) { sweep = Sweep(launch, trainable, options).fit(); });
  return sweep;
}

TEST(OperatorRow, AsTrainable) {
  const auto trainable = OperatorTrainer<Line>::as_trainable({.config = {{"lr", 0.5}}}, 3);
  const auto sweep =
      sweep_over(shared_folder(), trainable,
                 {.space = {{"lr", grid({0.001, 0.1, -1, 0.01})}}, .metric = "val_loss", .mode = ScoreOrder::min});
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials.at(2).status, TrialStatus::failed);
  EXPECT_NE(std::string(sweep->trials.at(2).error->what()).find("no such rate"), std::string::npos);
  const auto best = sweep->best();
  ASSERT_TRUE(best);
  EXPECT_EQ(best->config, Json({{"lr", 0.1}}));
  const auto rows = Result::from_path(best->path).metrics_history;
  ASSERT_EQ(rows.size(), 3u) << "a report for each step";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    EXPECT_TRUE(row.contains("train_loss") && row.contains("val_loss") && row.contains("val_accuracy")) << row;
    EXPECT_EQ(row.at("epoch"), i + 1) << "as train() counts them";
  }
  EXPECT_LT(rows.back().at("val_loss").get<double>(), rows.front().at("val_loss").get<double>());
  torch::nn::Linear elsewhere(1, 1);
  best->checkpoint->load("model", elsewhere);
  const auto unknown = sweep_over(shared_folder(), trainable,
                                  {.space = {{"rate", grid({1})}}, .metric = "val_loss", .mode = ScoreOrder::min});
  EXPECT_NE(std::string(unknown->error->what()).find("rate"), std::string::npos);
}

TEST(OperatorRow, AsTrainableWithAStepOfOnesOwn) {
  const auto storage = shared_folder();
  bool fails = true;
  const auto trainable = OperatorTrainer<Line>::as_trainable(
      [] { return std::make_unique<Line>(); }, {.config = {{"lr", 0.1}}}, 100,
      [&](OperatorTrainer<Line>& trainer, std::int64_t iteration) -> Json {
        const auto lr = trainer.get_local_operator().config().at("lr").get<double>();
        const auto loss = trainer.train({.num_steps = 2}).at("train_loss");
        if (fails && lr == 0.02 && iteration == 2 && trainer.get_local_operator().world_rank() == 0)
          throw std::runtime_error("over");
        Json step{{"loss", loss}, {"minus_lr", -lr}, {"iteration", iteration}};
        if (lr == 0.02) step["epoch"] = 100 + iteration;
        return step;
      });
  const SweepOptions options{.space = {{"lr", grid({0.01, 0.02})}},
                             .metric = "minus_lr",
                             .mode = ScoreOrder::max,
                             .scheduler = asha({.grace_period = 4, .max_t = 4})};
  auto sweep = sweep_over(storage, trainable, options);
  ASSERT_TRUE(sweep);
  EXPECT_EQ(sweep->trials[0].status, TrialStatus::done);
  EXPECT_EQ(sweep->trials[0].metrics.at("training_iteration"), 4) << "max_t is in steps";
  EXPECT_EQ(sweep->trials[1].status, TrialStatus::failed);
  EXPECT_EQ(Result::from_path(sweep->trials[1].path).metrics_history.size(), 2u);

  // It goes on at the step that has failed; earlier calls return their saved results.
  fails = false;
  Line::batches = 0;
  sweep = sweep_over(storage, trainable, options);
  ASSERT_TRUE(sweep);
  const auto& trial = sweep->trials[1];
  EXPECT_TRUE(trial.status == TrialStatus::done || trial.status == TrialStatus::stopped);
  const auto rows = Result::from_path(trial.path).metrics_history;
  ASSERT_EQ(rows.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[static_cast<std::size_t>(i)].at("iteration"), i);
    EXPECT_EQ(rows[static_cast<std::size_t>(i)].at("epoch"), 100 + i) << "the step's own";
  }
  EXPECT_GE(sweep->trials[0].metrics.at("epoch"), 1) << "the number of passes, from 1 on";
  EXPECT_EQ(world().all_reduce(std::int64_t{Line::batches}, ReduceOp::max), 2 * 2) << "two steps of two batches";
}

// The last test of the program, since its seed is that of all later runs.
TEST(TodayRow, EnableReproducibility) {
  const auto draw = [](std::uint64_t seed) {
    enable_reproducibility(seed);
    return Json{at::rand({1}).item<double>(), std::rand()}.dump();
  };
  const auto first = draw(7);
  EXPECT_EQ(draw(7), first);
  EXPECT_NE(draw(8), first);
  for (const auto& theirs : world().all_gather(first)) EXPECT_EQ(theirs, first) << "alike on every rank";
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_TRUE(at::globalContext().deterministicCuDNN());
  EXPECT_FALSE(at::globalContext().benchmarkCuDNN());
  EXPECT_NE(std::getenv("CUBLAS_WORKSPACE_CONFIG"), nullptr);

  // In main, for the training functions to come.
  enable_reproducibility(7);
  const double drawn_first = at::rand({1}).item<double>();
  const auto storage = shared_folder();
  const auto draws = [&](const std::string& name, int workers, bool ends, double* drawn) {
    return run({storage, {"--workers", std::to_string(workers)}, named(name)},
               [&](Session& session, const Config&) {
                 auto state = session.state({});
                 const bool restored = state.restore();
                 *drawn = at::rand({1}).item<double>();
                 EXPECT_EQ(session.broadcast_from_rank_zero(*drawn), *drawn) << "alike on every rank";
                 EXPECT_EQ(*drawn == drawn_first, !restored) << "by the seed that was given";
                 if (ends) return;
                 session.report({}, state);
                 throw std::runtime_error("stopped here");
               })
        .first;
  };
  const int ranks = world().size();
  for (const int workers : std::set{ranks, 1}) {
    const auto name = "by_" + std::to_string(workers);
    double before = 0, after = 0;
    EXPECT_EQ(draws(name, ranks, false, &before), 1);
    EXPECT_EQ(draws(name, workers, true, &after), 0);
    EXPECT_NE(after, before);
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

}  // namespace
}  // namespace muster::train_rows_test
