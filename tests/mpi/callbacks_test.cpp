// Callbacks: the order of their calls, ending training, saved states, and exceptions.
#include "support/job.hpp"

#include "base/file.hpp"
#include "muster/callbacks.hpp"
#include "muster/data_loader.hpp"
#include "observe/observers.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/open_session.hpp"
#include "support/io_errors.hpp"

#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::callbacks_test {
namespace {

using test::run;
using test::world;

using Loop = std::function<void(Session&, const Config&)>;

TorchTrainerOptions with(std::string name, std::vector<std::shared_ptr<Callback>> callbacks) {
  return {.run_config = {.name = std::move(name), .callbacks = std::move(callbacks)}};
}

/// Reports `loss` and a state after each of `epochs`; `each` may throw after a report.
Loop reporting(std::int64_t epochs, std::vector<std::int64_t>& seen, std::function<void(std::int64_t)> each = {}) {
  return [=, &seen](Session& session, const Config&) {
    std::int64_t next = 0;
    auto state = session.state({{"next", next}});
    state.restore();
    for (auto epoch : session.epochs(epochs)) {
      seen.push_back(epoch);
      ++next;
      session.report({{"loss", 1.0 / static_cast<double>(epoch + 1)}}, state);
      if (each) each(epoch);
    }
  };
}

/// Records its calls.
struct Recorder : Callback {
  void on_start(Session& session) override { say("start " + std::to_string(session.world_size())); }
  void on_epoch(std::int64_t epoch) override { say("epoch " + std::to_string(epoch)); }
  void on_batch(std::int64_t step) override { say("batch " + std::to_string(step)); }
  void on_report(const Json& row) override {
    say("report " + row.at("training_iteration").dump() + (row.contains("checkpoint_dir_name") ? "!" : ""));
  }
  void after_report(const std::vector<Json>& metrics, const std::optional<Checkpoint>& checkpoint) override {
    say("after " + Json(metrics).dump() + (checkpoint ? " " + checkpoint->path().filename().string() : ""));
  }
  void on_checkpoint(const Checkpoint& checkpoint) override { say(checkpoint.path().filename().string()); }
  void on_failure(const Error& error) override { say("failure " + std::to_string(static_cast<int>(error.code()))); }
  void after_exception(const std::map<int, std::string>& errors) override { exceptions.push_back(errors); }
  void on_end() override { say("end"); }

  void say(std::string moment) { moments.push_back(std::move(moment)); }
  std::vector<std::string> moments;
  std::vector<std::map<int, std::string>> exceptions;
};

TEST(Callbacks, AreToldOfTheMomentsInOrder) {
  const auto recorder = std::make_shared<Recorder>();
  auto options = with("moments", {recorder});
  options.datasets = {{"train", test::line()}};
  const auto [code, result] = run({test::shared_folder(), {}, options}, [](Session& session, const Config&) {
    auto state = session.state({});
    for ([[maybe_unused]] auto epoch : session.epochs(2)) {
      for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 23})) {
      }
      if (epoch == 1)
        session.report({{"rank", session.world_rank()}}, state);
      else
        session.report({{"rank", session.world_rank()}});
    }
  });
  EXPECT_EQ(code, 0);
  const auto n = std::to_string(world().size());
  Json of_ranks = Json::array();
  for (int r = 0; r < world().size(); ++r) of_ranks.push_back({{"rank", r}});
  // The metrics of a report are passed on as given, whatever else is sent with them.
  for (auto& moment : recorder->moments)
    if (moment.starts_with("after ")) {
      const auto end = moment.rfind(']') + 1;
      const auto given = Json::parse(moment.substr(6, end - 6));
      ASSERT_EQ(given.size(), of_ranks.size()) << moment;
      for (std::size_t r = 0; r < given.size(); ++r) EXPECT_EQ(given[r], of_ranks[r]) << moment;
      moment = "after" + moment.substr(end);
    }
  EXPECT_EQ(recorder->moments,
            (std::vector<std::string>{"start " + n, "batch 1", "batch 2", "report 1", "after", "epoch 0", "batch 3",
                                      "batch 4", "report 2", "checkpoint_000000", "after checkpoint_000000", "epoch 1",
                                      "end"}));
  EXPECT_TRUE(recorder->exceptions.empty());
}

/// Counts reports, and ends training after `most` of them on one worker.
struct Counting : Callback {
  Counting(int most_, int rank_) : most(most_), rank(rank_) {}
  void on_start(Session& session) override {
    reports = 0;
    asks = session.world_rank() == rank;
  }
  void on_report(const Json&) override { ++reports; }
  bool should_stop() const override { return asks && reports >= most; }
  Json state() const override { return reports; }
  void load_state(const Json& state) override { reports = state.get<int>(); }
  int most, rank, reports = 0;
  bool asks = false;
};

TEST(Callbacks, OneWorkersWordEndsTrainingOnAllAsDone) {
  const auto storage = test::shared_folder();
  const auto recorder = std::make_shared<Recorder>();
  const auto counting = std::make_shared<Counting>(2, world().size() - 1);
  std::vector<std::int64_t> seen;
  const auto [code, result] = run({storage, {}, with("ended", {recorder, counting})}, reporting(10, seen));
  EXPECT_EQ(code, 0);
  EXPECT_FALSE(result->error);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(result->metrics.at("training_iteration"), 2);
  EXPECT_EQ(recorder->moments.back(), "end") << "no failure";
  EXPECT_TRUE(Json::parse(detail::read_file(result->path / "params.json")).at("finished").get<bool>());

  const auto again = run({storage, {}, with("ended", {counting})}, reporting(10, seen));
  EXPECT_EQ(again.first, 0);
  EXPECT_EQ(seen.size(), 2u) << "it is finished";
  EXPECT_EQ(again.second->metrics_history.size(), 2u);
}

TEST(Callbacks, ATrainingFunctionThatHoldsOnIsToldAgain) {
  const auto counting = std::make_shared<Counting>(1, 0);
  int ended = 0;
  const auto [code, result] =
      run({test::shared_folder(), {}, with("swallowed", {counting})}, [&](Session& session, const Config&) {
        for (int i = 0; i < 3; ++i) try {
            session.report({{"i", i}});
          } catch (const Error& error) {
            ++ended;
            EXPECT_EQ(error.code(), ExitCode::done) << error.what();
          }
      });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(ended, 3);
}

TEST(Callbacks, AnEndThatIsReplacedByAnotherExceptionIsAnEnd) {
  const auto recorder = std::make_shared<Recorder>();
  const auto counting = std::make_shared<Counting>(1, 0);
  const auto [code, result] =
      run({test::shared_folder(), {}, with("replaced", {recorder, counting})}, [&](Session& session, const Config&) {
        try {
          session.report({{"loss", 1}});
        } catch (const std::exception& end) {
          EXPECT_THROW(session.barrier(), Error);
          throw std::runtime_error(std::string("training: ") + end.what());
        }
      });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(recorder->moments.back(), "end");
}

TEST(Callbacks, AnotherRanksErrorThatIsCaughtIsAFailure) {
  const auto recorder = std::make_shared<Recorder>();
  const auto [code, result] =
      run({test::shared_folder(), {}, with("of-another", {recorder})}, [&](Session& session, const Config&) {
        if (session.world_rank() == session.world_size() - 1) throw std::runtime_error("of one rank");
        try {
          session.barrier();
        } catch (const std::exception&) {
          EXPECT_THROW(session.epochs(1), RemoteError);
        }
      });
  EXPECT_EQ(code, 1);
  EXPECT_EQ(recorder->moments.back(), "failure 1");
}

TEST(Callbacks, AReportThatFailsLeavesAllAsItWas) {
  for (const std::string fault : {"a throwing entry", "a full disk", "a throwing callback", "a refused name"}) {
    const auto storage = test::shared_folder();
    struct Throwing : Callback {
      void on_report(const Json&) override {
        if (throws) throw std::runtime_error("thrown by a callback");
      }
      bool throws = false;
    };
    const auto counting = std::make_shared<Counting>(100, 0);
    const auto throwing = std::make_shared<Throwing>();
    const auto stopping = early_stopping({.metric = "loss", .mode = ScoreOrder::min, .patience = 3});
    auto options = with("failed", {counting, stopping});
    options.datasets = {{"train", test::line()}};
    options.run_config.checkpoint_config = {.num_to_keep = 1, .checkpoint_score_attribute = "score"};
    const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
      torch::nn::Linear net(1, 1);
      for (auto& parameter : net->parameters()) parameter.detach().fill_(0.5);
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1));
      torch::optim::ReduceLROnPlateauScheduler scheduler(optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.5f,
                                                         /*patience=*/0);
      session.add_callback(plateau(scheduler, {.metric = "loss"}));
      session.add_callback(throwing);
      bool throws = false;
      const StateEntry entry(
          [&] { return throws ? throw std::runtime_error("thrown by an entry") : StateDict{.values = 1}; },
          [](const StateDict&) {});
      auto state = session.state({{"net", net}, {"optimizer", optimizer}, {"scheduler", scheduler}, {"entry", entry}});
      const auto rate = [&] { return optimizer.param_groups().front().options().get_lr(); };
      const auto fail = [&](const Metrics& metrics) {
        std::optional<test::IoError> full;
        if (fault == "a full disk") full.emplace("open", "state.h5", ENOSPC);
        throws = fault == "a throwing entry";
        throwing->throws = fault == "a throwing callback";
        session.barrier();
        const ReportOptions named{.checkpoint_name = fault == "a refused name" ? "a/b" : ""};
        EXPECT_THROW(session.report(metrics, state, named), Error) << fault;
        session.barrier();
        throws = throwing->throws = false;
      };
      for ([[maybe_unused]] auto epoch : session.epochs(2)) {
        for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 23})) {
        }
        for (int i = 0; i < 2; ++i) fail({{"loss", 1}, {"score", 1}});
        EXPECT_EQ(rate(), 1) << fault;
        EXPECT_EQ(counting->reports, epoch) << fault;
        session.report({{"loss", 1}, {"score", 1}}, state);
        EXPECT_EQ(rate(), epoch == 0 ? 1 : 0.5) << fault;
      }
    });
    EXPECT_EQ(code, 0) << fault;
    ASSERT_EQ(result->metrics_history.size(), 2u) << fault;
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto& row = result->metrics_history[static_cast<std::size_t>(i)];
      EXPECT_EQ(row.at("training_iteration"), i + 1) << fault;
      EXPECT_EQ(row.at("num_samples"), 46) << fault;
    }
    EXPECT_EQ(result->checkpoint->to_dict().values.at("scheduler").at("num_bad_epochs"), 0) << fault;
  }
}

TEST(Callbacks, TheirStateOutlivesAJobAndAnAttempt) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> seen;
  // Two callbacks of the same class have separate states.
  const auto first = std::make_shared<Counting>(3, 0), second = std::make_shared<Counting>(100, 0);
  auto options = with("resumed", {first, second});
  const auto broken = run({storage, {}, options}, reporting(10, seen, [](std::int64_t epoch) {
                            if (epoch == 1) throw std::runtime_error("broken");
                          }));
  EXPECT_EQ(broken.first, 1);
  EXPECT_EQ(second->reports, 2);
  const auto anew = std::make_shared<Counting>(3, 0);
  EXPECT_EQ(run({storage, {}, with("resumed", {anew})}, reporting(10, seen)).first, 0);
  EXPECT_EQ(anew->reports, 3) << "one more, and no more";
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2}));

  // One job with an attempt that begins anew and one that goes on from a checkpoint.
  seen.clear();
  bool failed = false, failed_late = false;
  const auto counting = std::make_shared<Counting>(4, 0);
  options = with("retried", {counting});
  options.run_config.failure_config.max_failures = 2;
  const auto retried = run({storage, {}, options}, [&](Session& session, const Config& config) {
    if (!std::exchange(failed, true)) {
      session.report({{"loss", 1}});
      throw std::runtime_error("before the first checkpoint");
    }
    reporting(10, seen, [&](std::int64_t epoch) {
      if (epoch == 1 && !std::exchange(failed_late, true)) throw std::runtime_error("after the second");
    })(session, config);
  });
  EXPECT_EQ(retried.first, 0);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(retried.second->metrics_history.size(), 4u);
}

/// Reports the values of `rows` one after the other, beginning where the run stands, with a state.
Loop reporting_rows(std::vector<std::map<std::string, double>> rows, std::int64_t fails_after) {
  return [=](Session& session, const Config&) {
    std::int64_t next = 0;
    auto state = session.state({{"next", next}});
    state.restore();
    for (auto epoch : session.epochs(static_cast<std::int64_t>(rows.size()))) {
      ++next;
      Metrics metrics;
      for (const auto& [name, value] : rows[static_cast<std::size_t>(epoch)]) metrics.emplace(name, value);
      session.report(metrics, state);
      if (epoch == fails_after) throw std::runtime_error("broken");
    }
  };
}

std::string log_of(const std::filesystem::path& run) { return detail::read_file(run / "logs" / "rank_00000.log"); }

TEST(Callbacks, EarlyStoppingByAnotherMetricOrModeBeginsAnew) {
  // The loss is far below the accuracy, so a best value of the loss would never be beaten by the accuracy.
  const std::vector<std::map<std::string, double>> rows(6, {{"loss", 0.1}, {"error", 5}});
  const auto storage = test::shared_folder();
  for (const auto& [name, other] : {std::pair<std::string, EarlyStoppingOptions>{
                                        "metric", {.metric = "error", .mode = ScoreOrder::min, .patience = 3}},
                                    {"mode", {.metric = "loss", .mode = ScoreOrder::max, .patience = 3}}}) {
    EXPECT_EQ(
        run({storage, {}, with(name, {early_stopping({.metric = "loss", .mode = ScoreOrder::min, .patience = 3})})},
            reporting_rows(rows, 1))
            .first,
        1);
    const auto [code, result] =
        run({storage, {"--log-level", "warn"}, with(name, {early_stopping(other)})}, reporting_rows(rows, -1));
    EXPECT_EQ(code, 0);
    EXPECT_EQ(result->metrics_history.size(), 6u) << name << ": the third is the best, and three more are no better";
    const auto log = log_of(storage / name);
    EXPECT_NE(log.find("starts without a saved state"), std::string::npos) << log;
    EXPECT_NE(log.find("loss min"), std::string::npos) << log;
  }
}

TEST(Callbacks, TwoOfAClassFindTheirOwnStateInAnyOrder) {
  const std::vector<std::map<std::string, double>> rows(8, {{"loss", 0.1}, {"accuracy", 0.5}});
  const auto storage = test::shared_folder();
  const auto loss = [] { return early_stopping({.metric = "loss", .mode = ScoreOrder::min, .patience = 4}); };
  const auto accuracy = [] { return early_stopping({.metric = "accuracy", .mode = ScoreOrder::max, .patience = 100}); };
  EXPECT_EQ(run({storage, {}, with("order", {loss(), accuracy()})}, reporting_rows(rows, 2)).first, 1);
  const auto [code, result] =
      run({storage, {"--log-level", "warn"}, with("order", {accuracy(), loss()})}, reporting_rows(rows, -1));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(result->metrics_history.size(), 5u) << "the first is the best, and four more are no better";
  EXPECT_EQ(log_of(storage / "order").find("starts without a saved state"), std::string::npos);
}

TEST(Callbacks, APlateauOfAnotherMetricBeginsAnewAndItsRateStays) {
  const auto storage = test::shared_folder();
  const auto train = [](const std::string& metric, bool added_first, std::int64_t fails_after) {
    return [=](Session& session, const Config&) {
      torch::nn::Linear net(1, 1);
      torch::optim::SGD optimizer(net->parameters(), 1.0);
      torch::optim::ReduceLROnPlateauScheduler scheduler(optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                         /*factor=*/0.5F, /*patience=*/0);
      auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"scheduler", scheduler}});
      if (added_first) session.add_callback(plateau(scheduler, {.metric = metric}));
      state.restore();
      if (!added_first) session.add_callback(plateau(scheduler, {.metric = metric}));
      session.add_callback(learning_rate_monitor(optimizer));
      for (auto epoch : session.epochs(5)) {
        session.report({{"loss", 0.1}, {"error", 5.0 - static_cast<double>(epoch)}}, state);
        if (epoch == fails_after) throw std::runtime_error("broken");
      }
    };
  };
  for (const bool added_first : {false, true}) {
    const std::string name = added_first ? "first" : "later";
    EXPECT_EQ(run({storage, {}, with(name, {})}, train("loss", added_first, 1)).first, 1);
    const auto [code, result] =
        run({storage, {"--log-level", "warn"}, with(name, {})}, train("error", added_first, -1));
    EXPECT_EQ(code, 0);
    EXPECT_EQ(result->metrics_table().column("lr"), (std::vector<double>{1, 1, 0.5, 0.5, 0.5}))
        << "the error gets better, but never below the best loss";
    const auto log = log_of(storage / name);
    EXPECT_NE(log.find("starts without a saved state"), std::string::npos) << log;
  }
}

TEST(Callbacks, WhatTheCheckpointKnowsToBeDoneIsNotTrained) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> seen;
  run({storage, {}, with("known", {std::make_shared<Counting>(100, 0)})}, reporting(10, seen, [](std::int64_t epoch) {
        if (epoch == 1) throw std::runtime_error("killed before it is said to be finished");
      }));
  const auto [code, result] =
      run({storage, {}, with("known", {std::make_shared<Counting>(2, 0)})}, reporting(10, seen));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(seen.size(), 2u) << "no epoch is trained";
  EXPECT_EQ(result->metrics_history.size(), 2u);
}

TEST(Callbacks, AnotherRunsStateIsNotTakenOver) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> seen;
  const auto first = run({storage, {}, with("first", {std::make_shared<Counting>(2, 0)})}, reporting(10, seen));
  auto options = with("second", {std::make_shared<Counting>(2, 0)});
  options.resume_from_checkpoint = first.second->checkpoint;
  EXPECT_EQ(run({storage, {}, options}, reporting(10, seen)).first, 0);
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3}));
}

TEST(Callbacks, AfterExceptionNamesEveryRank) {
  const auto recorder = std::make_shared<Recorder>();
  auto options = with("exceptions", {recorder});
  options.run_config.failure_config.max_failures = 1;
  const int spares = world().size() > 2 ? 1 : 0, workers = world().size() - spares;
  options.scaling_config.num_workers = workers;
  int attempts = 0;
  const auto [code, result] = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    if (attempts++ == 0) throw std::runtime_error("thrown by " + std::to_string(session.world_rank()));
    if (session.world_rank() == workers - 1) throw std::runtime_error("alone");
    session.barrier();
  });
  EXPECT_EQ(code, 1);
  if (world().rank() >= workers) {
    EXPECT_TRUE(recorder->exceptions.empty()) << "a spare trains nothing";
    return;
  }
  ASSERT_EQ(recorder->exceptions.size(), 2u) << "of each attempt";
  ASSERT_EQ(recorder->exceptions[0].size(), static_cast<std::size_t>(workers));
  for (const auto& [rank, text] : recorder->exceptions[0]) EXPECT_EQ(text, "thrown by " + std::to_string(rank));
  EXPECT_EQ(recorder->exceptions[1].size(), static_cast<std::size_t>(workers));
  for (const auto& [rank, text] : recorder->exceptions[1])
    EXPECT_NE(text.find("alone"), std::string::npos) << rank << ": " << text;
  EXPECT_EQ(recorder->exceptions[1].at(workers - 1), "alone");
  EXPECT_EQ(std::ranges::count(recorder->moments, "failure 1"), 2);
}

TEST(Callbacks, AStopOnRequestIsNoException) {
  const auto storage = test::shared_folder();
  const auto recorder = std::make_shared<Recorder>();
  const auto [code, result] = run({storage, {}, with("stopped", {recorder})}, [&](Session& session, const Config&) {
    if (session.world_rank() == 0) std::ofstream(storage / "stopped/stop") << "please";
    session.report({{"a", 1}}, session.state({}));
  });
  EXPECT_EQ(code, static_cast<int>(ExitCode::stopped));
  EXPECT_TRUE(recorder->exceptions.empty());
  EXPECT_EQ(recorder->moments.back(), "failure 85");
}

/// Throws in one of its calls, on one worker.
struct Throwing : Callback {
  Throwing(std::string moment_, int rank_) : moment(std::move(moment_)), rank(rank_) {}
  void on_start(Session&) override { at("start"); }
  void on_epoch(std::int64_t) override { at("epoch"); }
  void on_report(const Json&) override { at("report"); }
  void after_report(const std::vector<Json>&, const std::optional<Checkpoint>&) override { at("after_report"); }
  void on_checkpoint(const Checkpoint&) override { at("checkpoint"); }
  void on_failure(const Error&) override { at("failure"); }
  void after_exception(const std::map<int, std::string>&) override { at("exception"); }
  void on_end() override { at("end"); }
  Metrics metrics() override { return at("metrics"), Metrics(); }
  bool should_stop() const override { return at("should_stop"), false; }
  Json state() const override { return at("state"), nullptr; }
  void at(const std::string& now) const {
    if (now == moment && world().rank() == rank) throw std::runtime_error("at " + now);
  }
  std::string moment;
  int rank;
};

TEST(Callbacks, WhatTheyThrowEndsTrainingOnAllRanks) {
  const auto storage = test::shared_folder();
  const int last = world().size() - 1;
  for (const std::string moment :
       {"start", "epoch", "report", "after_report", "checkpoint", "metrics", "should_stop", "state"}) {
    SCOPED_TRACE(moment);
    std::vector<std::int64_t> seen;
    const auto [code, result] =
        run({storage, {}, with(moment, {std::make_shared<Throwing>(moment, last)})}, reporting(3, seen));
    EXPECT_EQ(code, 1);
    ASSERT_TRUE(result->error);
    EXPECT_NE(std::string(result->error->what()).find("at " + moment), std::string::npos) << result->error->what();
  }
  std::vector<std::int64_t> seen;
  EXPECT_EQ(run({storage, {}, with("end", {std::make_shared<Throwing>("end", last)})}, reporting(3, seen)).first, 0);
  for (const std::string moment : {"failure", "exception"}) {
    SCOPED_TRACE(moment);
    const auto recorder = std::make_shared<Recorder>();
    const auto [code, result] = run({storage, {}, with(moment, {std::make_shared<Throwing>(moment, last), recorder})},
                                    [](Session&, const Config&) { throw std::runtime_error("the cause"); });
    EXPECT_EQ(code, 1);
    EXPECT_NE(std::string(result->error->what()).find("the cause"), std::string::npos) << result->error->what();
    EXPECT_EQ(recorder->exceptions.size(), 1u) << "the others are told";
  }
}

TEST(Callbacks, WhatOneThrowsInAReportIsThrownOnAllAndTrainingMayGoOn) {
  const int last = world().size() - 1;
  for (const std::string moment : {"report", "after_report", "checkpoint", "metrics", "state", "should_stop"}) {
    SCOPED_TRACE(moment);
    const auto throwing = std::make_shared<Throwing>(moment, last);
    const auto [code, result] =
        run({test::shared_folder(), {}, with(moment, {throwing})}, [&](Session& session, const Config&) {
          std::int64_t value = 0;
          auto state = session.state({{"value", value}});
          try {
            session.report({{"a", 1}}, state);
            ADD_FAILURE() << "nothing was thrown";
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("at " + moment), std::string::npos) << error.what();
          }
          throwing->moment.clear();
          session.report({{"a", 2}}, state);
        });
    EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
    ASSERT_TRUE(result && result->checkpoint);
    EXPECT_EQ(result->metrics.at("a"), 2.0);
  }
}

TEST(Callbacks, WhatOneThrowsIsNotHiddenByAnErrorOfTheRow) {
  struct Failing : detail::observe::Observer {
    void checkpoint(const Checkpoint&) override { throw std::runtime_error("at checkpoint"); }
    void report(const Json&, std::int64_t) override { throw std::runtime_error("at row"); }
  };
  const auto storage = test::shared_folder();
  const auto train = [](Launch& launch) {
    const auto resolved = detail::run::resolve(launch, TrainerOptions(), nullptr);
    const detail::run::RunFolder run(launch.communicator(), launch, resolved.options.run_config);
    const auto workers = launch.communicator().duplicate(), control = workers.duplicate();
    detail::session::BadSteps bad_steps;
    detail::session::OpenSession session(resolved, run, workers, control, at::kCPU, bad_steps);
    session.open();
    std::vector<std::unique_ptr<detail::observe::Observer>> observers;
    observers.push_back(std::make_unique<Failing>());
    session.state().outputs.observers = detail::observe::Observers(std::move(observers));
    std::int64_t value = 0;
    auto state = session.user_session().state({{"value", value}});
    try {
      session.user_session().report({{"a", 1}}, state);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("at checkpoint"), std::string::npos) << error.what();
    }
    session.close();
  };
  EXPECT_EQ(test::main_with({"--storage", storage.string(), "--name", "hidden", "--progress", "none"}, train), 0);
}

TEST(Callbacks, AStateThatJsonDoesNotKeepIsRefusedWhenItIsSaved) {
  struct Best : Callback {
    Json state() const override { return {{"best", std::numeric_limits<double>::infinity()}}; }
  };
  std::vector<std::int64_t> seen;
  const auto [code, result] =
      run({test::shared_folder(), {}, with("best", {std::make_shared<Best>()})}, reporting(2, seen));
  EXPECT_EQ(code, static_cast<int>(ExitCode::user_error));
  ASSERT_TRUE(result->error);
  EXPECT_NE(std::string(result->error->what()).find("Best/best: it is inf"), std::string::npos)
      << result->error->what();
}

TEST(Callbacks, AReportThatWasRefusedHasNotBeen) {
  auto recorder = std::make_shared<Recorder>();
  auto options = with("refused", {recorder});
  options.run_config.checkpoint_config = {.num_to_keep = 1, .checkpoint_score_attribute = "score"};
  const auto [code, result] = run({test::shared_folder(), {}, options}, [](Session& session, const Config&) {
    std::int64_t next = 0;
    auto state = session.state({{"next", next}});
    EXPECT_THROW(session.report({{"score", "high"}}, state), Error);  // no number
    session.report({{"score", 0.5}}, state);
  });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
  ASSERT_TRUE(result && result->metrics.contains("training_iteration"));
  EXPECT_EQ(result->metrics.at("training_iteration"), 1);
  std::vector<std::string> reports;
  for (const auto& line : recorder->moments)
    if (line.starts_with("report")) reports.push_back(line);
  EXPECT_EQ(reports, (std::vector<std::string>{"report 1"}));
}

TEST(Callbacks, EarlyStoppingIsSavedWithAnInfiniteMetric) {
  const auto [code, result] =
      run({test::shared_folder(),
           {},
           with("infinite", {early_stopping({.metric = "loss", .mode = ScoreOrder::min, .patience = 5})})},
          [](Session& session, const Config&) {
            std::int64_t next = 0;
            auto state = session.state({{"next", next}});
            for (const auto epoch : session.epochs(3))
              session.report({{"loss", epoch == 0 ? std::numeric_limits<double>::infinity() : 1.0}}, state);
          });
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
}

TEST(Callbacks, AStateThatCannotBeTakenIsSaid) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> seen;
  struct Changing : Callback {
    explicit Changing(Json state) : state_(std::move(state)) {}
    Json state() const override { return state_; }
    void load_state(const Json& state) override { static_cast<void>(state.at("count").get<int>()); }
    Json state_;
  };
  EXPECT_EQ(run({storage, {}, with("odd", {std::make_shared<Changing>("text")})},
                reporting(2, seen, [](auto) { throw std::runtime_error("broken"); }))
                .first,
            1);
  const auto [code, result] = run({storage, {}, with("odd", {std::make_shared<Changing>("text")})}, reporting(2, seen));
  EXPECT_EQ(code, static_cast<int>(ExitCode::data));
  EXPECT_NE(std::string(result->error->what()).find("Changing"), std::string::npos) << result->error->what();
}

TEST(Callbacks, ThoseOfTheTrainingFunctionEndWithIt) {
  struct Local : Recorder {
    explicit Local(int& reports) : reports_(&reports) {}
    void on_report(const Json& row) override { ++*reports_, Recorder::on_report(row); }
    int* reports_;
  };
  std::weak_ptr<Local> seen;
  std::vector<std::string> moments;
  for (const bool fails : {false, true}) {
    const auto [code, result] =
        run({test::shared_folder(), {}, with("local", {})}, [&](Session& session, const Config&) {
          int reports = 0;
          const auto local = std::make_shared<Local>(reports);
          seen = local;
          session.add_callback(local);
          session.report({{"loss", 1}});
          EXPECT_EQ(reports, 1);
          moments = local->moments;
          if (fails) throw std::runtime_error("as told");
        });
    EXPECT_EQ(code, fails ? 1 : 0);
    ASSERT_FALSE(moments.empty());
    EXPECT_EQ(moments.front(), "start " + std::to_string(world().size()));
    EXPECT_TRUE(seen.expired());
  }
}

TEST(Callbacks, TheirMetricsAreInTheRow) {
  struct Adding : Callback {
    Metrics metrics() override { return {{"rank", world().rank()}, {"loss", 7}}; }
  };
  const auto [code, result] = run({test::shared_folder(), {}, with("metrics", {std::make_shared<Adding>()})},
                                  [](Session& session, const Config&) {
                                    session.report({{"loss", 1}});
                                  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(result->metrics.at("loss"), 1) << "the training function's own";
  EXPECT_DOUBLE_EQ(result->metrics.at("rank").get<double>(), (world().size() - 1) / 2.0);
}

TEST(Callbacks, MayBeOnOneWorkerAlone) {
  const auto counting = std::make_shared<Counting>(2, 0);
  std::vector<std::shared_ptr<Callback>> callbacks;
  if (world().rank() == 0) callbacks.push_back(counting);
  std::vector<std::int64_t> seen;
  const auto [code, result] = run({test::shared_folder(), {}, with("first", callbacks)}, reporting(10, seen));
  EXPECT_EQ(code, 0);
  EXPECT_EQ(seen.size(), 2u);
}

/// A dataset that takes `delay` for each sample.
struct SlowSamples : torch::data::datasets::Dataset<SlowSamples> {
  explicit SlowSamples(std::chrono::milliseconds delay) : delay(delay) {}
  torch::data::Example<> get(std::size_t) override {
    std::this_thread::sleep_for(delay);
    return {at::zeros({1}), at::zeros({1})};
  }
  c10::optional<std::size_t> size() const override { return 100'000; }
  std::chrono::milliseconds delay;
};

/// Ends training when it has heard of a late rank.
struct LateRankListener : Callback {
  void on_late_rank(const LateRank& late) override { heard = late; }
  bool should_stop() const override { return heard.has_value(); }
  std::optional<LateRank> heard;
};

TEST(Callbacks, HearOfALateRank) {
  const auto listener = std::make_shared<LateRankListener>();
  const int last = world().size() - 1;
  const auto [code, result] =
      run({test::shared_folder(), {}, with("late", {listener})}, [&](Session& session, const Config&) {
        const std::chrono::milliseconds delay(session.world_rank() == last ? 40 : 2);
        auto loader = prepare_data_loader(session, SlowSamples(delay), {.batch_size = 1});
        std::int64_t step = 0;
        for ([[maybe_unused]] auto& batch : *loader) {
          session.barrier();
          if (++step % 20 == 0) session.report({{"step", step}});
          if (world().size() == 1 && step == 60) return;
        }
      });
  EXPECT_EQ(code, 0);
  const auto& rows = result->metrics_history;
  ASSERT_FALSE(rows.empty());
  const auto& row = rows.back();
  const auto& times = row.at("rank_times");
  for (const char* activity : {"compute", "wait", "data", "save"}) {
    const auto& part = times.at(activity);
    EXPECT_LE(part.at("min"), part.at("median")) << activity;
    EXPECT_LE(part.at("median"), part.at("max")) << activity;
    EXPECT_LT(part.at("max_rank"), world().size()) << activity;
  }
  EXPECT_GT(row.at("memory_bytes").at("max"), 1 << 20);
  if (world().size() == 1) {
    EXPECT_FALSE(row.contains("late_ranks"));
    return;
  }
  EXPECT_EQ(times.at("data").at("max_rank"), last);
  ASSERT_EQ(listener->heard.has_value(), world().rank() == 0) << "on the first worker only";
  if (world().rank() != 0) return;
  EXPECT_EQ(listener->heard->rank, last);
  EXPECT_EQ(listener->heard->cause, LateCause::data);
  EXPECT_GT(listener->heard->behind, 0.1);
  EXPECT_EQ(row.at("late_ranks").at(0).at("rank"), last);
  EXPECT_EQ(row.at("late_ranks").at(0).at("cause"), to_string(LateCause::data));
}

TEST(Callbacks, HearOfARankThatSavesSlowly) {
  if (world().size() == 1) GTEST_SKIP() << "one rank alone is never late";
  // Its part of a save takes as long as the steps between two saves, however long they take on a busy machine.
  struct SlowState : Callback {
    using Clock = std::chrono::steady_clock;
    Json state() const override {
      if (world().rank() == world().size() - 1)
        std::this_thread::sleep_for(std::max<Clock::duration>(Clock::now() - last, std::chrono::milliseconds(40)));
      last = Clock::now();
      return nullptr;
    }
    mutable Clock::time_point last = Clock::now();
  };
  struct SlowSaveListener : LateRankListener {
    void on_late_rank(const LateRank& late) override {
      if (late.cause == LateCause::saving) heard = late;
    }
  };
  const auto listener = std::make_shared<SlowSaveListener>();
  const auto [code, result] =
      run({test::shared_folder(), {}, with("saves", {listener, std::make_shared<SlowState>()})},
          [&](Session& session, const Config&) {
            std::int64_t step = 0;
            auto state = session.state({{"step", step}});
            auto loader = prepare_data_loader(session, SlowSamples(std::chrono::milliseconds(1)), {.batch_size = 1});
            for ([[maybe_unused]] auto& batch : *loader) {
              session.barrier();
              if (++step % 4 == 0) session.report({{"step", step}}, state);
            }
          });
  EXPECT_EQ(code, 0);
  const auto slowest_is_last = [&](const Json& row) {
    return row.at("rank_times").at("save").at("max_rank") == world().size() - 1;
  };
  EXPECT_GE(std::ranges::count_if(result->metrics_history, slowest_is_last), 5) << "of at least 8";
  if (world().rank() != 0) return;
  ASSERT_TRUE(listener->heard.has_value());
  EXPECT_EQ(listener->heard->rank, world().size() - 1);
  EXPECT_EQ(listener->heard->cause, LateCause::saving);
}

}  // namespace
}  // namespace muster::callbacks_test
