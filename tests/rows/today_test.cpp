// Newer features of Ray Train, with a test for each, with any number of ranks.
#include "support/job.hpp"

#include "base/file.hpp"
#include "supervise/decision.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::today_test {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;
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

TEST(TodayRow, PlateauAndLearningRateMonitor) {
  const auto storage = shared_folder();
  const auto train = [](std::int64_t breaks_at) {
    return [breaks_at](Session& session, const Config&) {
      torch::nn::Linear net(1, 1);
      torch::optim::SGD optimizer(net->parameters(), 1.0);
      torch::optim::ReduceLROnPlateauScheduler scheduler(optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                         /*factor=*/0.5F, /*patience=*/0);
      auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}});
      state.restore();
      session.add_callback(learning_rate_monitor(optimizer));
      session.add_callback(plateau(scheduler, {.metric = "loss"}));
      for (const auto epoch : session.epochs(4)) {
        session.report({{"loss", epoch == 0 ? 1.0 : 2.0}}, state);
        if (epoch == breaks_at) throw std::runtime_error("broken");
      }
    };
  };
  const auto rates = [](const std::optional<Result>& result) { return result->metrics_table().column("lr"); };
  const auto whole = run({storage, {}, named("whole")}, train(-1)).second;
  EXPECT_EQ(rates(whole), (std::vector<double>{1, 1, 0.5, 0.25})) << "that with which the epoch was trained";
  EXPECT_EQ(run({storage, {}, named("broken")}, train(1)).first, 1);
  EXPECT_EQ(rates(run({storage, {}, named("broken")}, train(-1)).second), rates(whole))
      << "the step for a report is in its checkpoint";
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

TEST(TodayRow, AfterReportAndAfterException) {
  struct Ray : Callback {
    void after_report(const std::vector<Json>& metrics, const std::optional<Checkpoint>& checkpoint) override {
      for (const auto& one : metrics) ranks.push_back(one.at("rank"));
      saved = checkpoint.has_value();
    }
    void after_exception(const std::map<int, std::string>& errors) override { texts = errors; }
    std::vector<int> ranks;
    bool saved = false;
    std::map<int, std::string> texts;
  };
  const auto ray = std::make_shared<Ray>();
  EXPECT_EQ(run({shared_folder(), {}, named("ray", {ray})},
                [](Session& session, const Config&) {
                  session.report({{"rank", session.world_rank()}}, session.state({}));
                  throw std::runtime_error("of rank " + std::to_string(session.world_rank()));
                })
                .first,
            1);
  EXPECT_TRUE(ray->saved);
  ASSERT_EQ(ray->ranks.size(), static_cast<std::size_t>(world().size()));
  for (int rank = 0; rank < world().size(); ++rank) {
    EXPECT_EQ(ray->ranks[static_cast<std::size_t>(rank)], rank);
    EXPECT_EQ(ray->texts[rank], "of rank " + std::to_string(rank));
  }
}

// --- Result ---

TEST(TodayRow, ResultFromPath) {
  const auto storage = shared_folder();
  auto options = named("whole");
  options.run_config.checkpoint_config = {.checkpoint_score_attribute = "loss",
                                          .checkpoint_score_order = ScoreOrder::min};
  const auto fitted = run({storage, {}, options}, losing({3, 1, 2})).second;
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
  const auto result = run({storage, {}, named("best")}, losing({3, 1, std::nan(""), 2})).second;
  EXPECT_EQ(result->get_best_checkpoint("loss", ScoreOrder::min)->path(), storage / "best/checkpoint_000001");
  EXPECT_EQ(result->get_best_checkpoint("loss", ScoreOrder::max)->path(), storage / "best/checkpoint_000000");
  EXPECT_THROW(static_cast<void>(result->get_best_checkpoint("accuracy", ScoreOrder::max)), Error);
  EXPECT_FALSE(Result().get_best_checkpoint("loss", ScoreOrder::min)) << "there are none";
  auto pruned = named("pruned");
  pruned.run_config.checkpoint_config.num_to_keep = 2;
  EXPECT_EQ(run({storage, {}, pruned}, losing({1, 3, 2})).second->get_best_checkpoint("loss", ScoreOrder::min)->path(),
            storage / "pruned/checkpoint_000002")
      << "of those that are there";
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
      for (const std::string name : {"a/b", ".hidden", "checkpoint_000009", "checkpoint_best", "result.json", "logs",
                                     "artifacts", "stop", "trial.json", "sweep.json", "a\nb", "a\xff"})
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
}

TEST(TodayRow, ANamedCheckpointIsGoneBackTo) {
  const auto storage = shared_folder();
  const auto train = [](Session& session, const Config& config) {
    std::int64_t epoch = 0;
    auto state = session.state({{"epoch", epoch}});
    state.restore();
    if (config.at("looks")) EXPECT_EQ(epoch, 1);
    for (; epoch < 3 && !config.at("looks");) {
      ++epoch;
      session.report({{"at", epoch}}, state, {.checkpoint_name = epoch == 1 ? "best" : ""});
    }
  };
  auto options = named("back");
  options.train_loop_config = {{"looks", false}};
  run({storage, {}, options}, train);
  const auto best = (storage / "back/best").string();
  EXPECT_EQ(run({storage, {"--set", "looks=true", "--resume", best}, options}, train).first, 0);
  // A name that another file has is a warning.
  auto taken = named("taken");
  const auto code = run({storage, {}, taken}, [](Session& session, const Config&) {
                      fs::create_directories(session.artifacts().parent_path() / "mine");
                      session.barrier();
                      session.report({{"a", 1}}, session.state({}), {.checkpoint_name = "mine"});
                    }).first;
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(fs::is_directory(fs::symlink_status(storage / "taken/mine")));
  EXPECT_TRUE(fs::exists(storage / "taken/checkpoint_000000"));
  // Different names are refused.
  if (world().size() == 1) return;
  const auto different = run({storage, {}, named("different")}, [](Session& session, const Config&) {
    session.report({{"a", 1}}, session.state({}), {.checkpoint_name = "of_" + std::to_string(session.world_rank())});
  });
  EXPECT_EQ(different.first, 1);
  EXPECT_NE(std::string(different.second->error->what()).find("checkpoint_name"), std::string::npos);
}

TEST(TodayRow, ANameIsMendedAfterAKill) {
  const auto storage = shared_folder();
  const auto train = [](bool breaks) {
    return [breaks](Session& session, const Config&) {
      std::int64_t epoch = 0;
      auto state = session.state({{"epoch", epoch}});
      if (!state.restore()) session.report({{"a", 1}}, state, {.checkpoint_name = "best"});
      if (breaks) throw std::runtime_error("broken");
    };
  };
  EXPECT_EQ(run({storage, {}, named("mended")}, train(true)).first, 1);
  if (world().rank() == 0) fs::remove(storage / "mended/best");
  EXPECT_EQ(run({storage, {}, named("mended")}, train(false)).first, 0);
  world().barrier();
  EXPECT_EQ(named_by(storage / "mended", "best"), "checkpoint_000000");
  world().barrier();
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
    // Not by support/job.hpp, which gives --log-level.
    std::vector<std::string> words{"job", "--storage", storage.string(), "--progress", "none"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    Launch launch(static_cast<int>(argv.size()), argv.data());
    return launch.run([&] {
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

// How `muster run` reads the progress in a run's folder.
TEST(TodayRow, MaxPreemptionFailures) {
  using namespace detail::supervise;
  auto options = named("counted");
  options.run_config.failure_config = {.max_failures = 1, .max_preemption_failures = 2};
  const auto [code, result] = run({shared_folder(), {}, options}, [](Session&, const Config&) {});
  EXPECT_EQ(code, 0);
  const auto limits = Json::parse(detail::read_file(result->path / "params.json")).at("run_config");
  const JobRequirements requirements{.ranks = 2,
                                     .min_workers = 2,
                                     .max_failures = limits.at("max_failures"),
                                     .max_preemptions = limits.at("max_preemption_failures")};
  const JobEnd preempted{.code = 1, .report = {.run = result->path, .preempted = true}};
  const JobEnd failed{.code = static_cast<int>(ExitCode::retry), .report = {.run = result->path}};
  ASSERT_TRUE(is_preemption(preempted));
  ASSERT_FALSE(is_preemption(failed));
  for (int count = 1; count <= 3; ++count) {
    EXPECT_EQ(decide(preempted, {.count = count}, requirements, 2, false).again, count <= 2) << count;
    EXPECT_EQ(decide(failed, {.count = count}, requirements, 2, false).again, count <= 1) << count;
  }
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
  const auto workers = [&](NumWorkers asked, std::vector<std::string> flags = {}) {
    auto options = named("run");
    options.scaling_config.num_workers = asked;
    int seen = 0;
    const auto code = run({shared_folder(), std::move(flags), options}, [&](Session& session, const Config&) {
                        seen = session.world_size();
                      }).first;
    return std::pair(code, static_cast<int>(world().all_reduce(std::int64_t{seen}, ReduceOp::max)));
  };
  EXPECT_EQ(workers({1, 2}), std::pair(0, std::min(2, ranks)));
  EXPECT_EQ(workers({1, 64}), std::pair(0, ranks)) << "as many as there are";
  EXPECT_EQ(workers({ranks, ranks}), std::pair(0, ranks));
  EXPECT_EQ(workers({}), std::pair(0, ranks));
  EXPECT_EQ(workers({2, 64}, {"--workers", "1"}), std::pair(0, 1)) << "the flag wins";
  const int usage = static_cast<int>(ExitCode::usage);
  EXPECT_EQ(workers({ranks + 1, 64}).first, usage);
  EXPECT_EQ(workers({0, 2}).first, usage);
  EXPECT_EQ(workers({3, 2}).first, usage);
  const ScalingConfig range{.num_workers = {2, 4}}, plain{.num_workers = 4}, all;
  EXPECT_EQ(Json(range).at("num_workers"), Json::array({2, 4}));
  EXPECT_EQ(Json(range).get<ScalingConfig>().num_workers, NumWorkers(2, 4));
  EXPECT_EQ(Json(plain).at("num_workers"), 4);
  EXPECT_TRUE(Json(all).at("num_workers").is_null());
  for (const Json& wrong : {Json::array({2}), Json::array({1, 2, 3}), Json::array({"a", 2}), Json::array({1.5, 2})})
    EXPECT_THROW(static_cast<void>(Json{{"num_workers", wrong}}.get<ScalingConfig>()), Error) << wrong;
}

TEST(TodayRow, StoragePathThatIsAUrl) {
  const auto [code, result] = test::launch({"s3://bucket/runs"}, [](Launch& launch) {
    return TorchTrainer(
               launch, [](Session&) {}, named("remote"))
        .fit();
  });
  EXPECT_EQ(code, static_cast<int>(ExitCode::usage));
  EXPECT_FALSE(result);
}

// --- The user's own trainers ---

TEST(TodayRow, DefaultDatasetConfig) {
  struct All : TorchTrainer {
    using TorchTrainer::TorchTrainer;
    DataConfig default_dataset_config() const override { return {.split_all = true}; }
  };
  const int ranks = world().size();
  const auto rows = [&](const DataConfig& config) {
    std::pair<std::int64_t, std::int64_t> seen;
    TorchTrainerOptions options = named("run");
    options.dataset_config = config;
    for (const char* name : {"train", "valid"})
      options.datasets.emplace(name, Dataset::from_tensors({{"x", at::ones({6 * ranks, 1})}}));
    const auto count = [](const DatasetShard& shard) {
      std::int64_t samples = 0;
      for (const auto& batch : shard.iter_torch_batches({.batch_size = 1, .training = false})) samples += batch.size();
      return samples;
    };
    const auto code =
        test::launch({shared_folder()}, [&](Launch& launch) {
          return All(
                     launch,
                     [&](Session& session) {
                       seen = {count(session.get_dataset_shard("train")), count(session.get_dataset_shard("valid"))};
                     },
                     options)
              .fit();
        }).first;
    EXPECT_EQ(code, 0);
    return seen;
  };
  using Seen = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(rows({}), Seen(6, 6)) << "the trainer's";
  EXPECT_EQ(rows({.datasets_to_split = {"train"}}), Seen(6, 6 * ranks)) << "a list is all that is split";
  EXPECT_EQ(rows({.datasets_to_split = {}}), Seen(6 * ranks, 6 * ranks)) << "nothing";
  EXPECT_EQ(rows({.split_all = false}), Seen(6, 6 * ranks));
  std::string program = "job";
  char* argv[] = {program.data()};
  Launch launch(1, argv);
  const All trainer(launch, [](Session&) {}, {.dataset_config = {.datasets_to_split = {"valid"}}});
  EXPECT_EQ(trainer.get_dataset_config().datasets_to_split, std::vector<std::string>{"valid"});
  EXPECT_FALSE(trainer.get_dataset_config().split_all.value_or(false));
  EXPECT_TRUE(All(launch, [](Session&) {}).get_dataset_config().split_all.value());
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

}  // namespace
}  // namespace muster::today_test
