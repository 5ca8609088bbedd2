// Sweeps with ranks: which ranks run which trial, how trials end, the files, and a second start.
#include "comm/make_world.hpp"
#include "comm/timeout.hpp"
#include "launch/part.hpp"
#include "muster/muster.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::sweep_test {
namespace {

using test::world;

struct Job {
  std::filesystem::path storage;
  std::vector<std::string> flags = {};
};

struct Ended {
  int code = 0;
  std::optional<SweepResult> sweep;
  std::string said;  // by rank 0
};

/// Starts it on all ranks as a program's main would.
Ended launch(const Job& job, const std::function<SweepResult(Launch&)>& fit) {
  std::vector<std::string> words{"job", "--storage", job.storage.string(), "--name", "sweep"};
  words.insert(words.end(), job.flags.begin(), job.flags.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Ended ended;
  testing::internal::CaptureStderr();
  {
    Launch launch(static_cast<int>(argv.size()), argv.data());
    ended.code = launch.run([&] { return *(ended.sweep = fit(launch)); });
  }
  ended.said = world().broadcast(testing::internal::GetCapturedStderr());
  return ended;
}

Ended run(const Job& job, const std::function<void(Session&, const Config&)>& loop, Config defaults,
          const SweepOptions& options) {
  return launch(job, [&](Launch& launch) {
    TorchTrainer trainer(launch, loop, {.train_loop_config = std::move(defaults)});
    return Sweep(launch, trainer.as_trainable(), options).fit();
  });
}

/// Counts epochs in its state and reports {"value": config's} for each.
void count(
    Session& session, const Config& config,
    const std::function<void(std::int64_t)>& before_report = [](std::int64_t) {}) {
  std::int64_t epochs = 0;
  auto state = session.state({{"epochs", epochs}});
  state.restore();
  while (epochs < config.value("epochs", 1)) {
    ++epochs;
    before_report(epochs);
    session.report({{"value", config.at("value").get<double>()}, {"epochs", epochs}}, state);
  }
}

std::vector<TrialStatus> statuses(const Ended& ended) {
  std::vector<TrialStatus> all;
  if (ended.sweep)
    for (const auto& trial : ended.sweep->trials) all.push_back(trial.status);
  return all;
}

int number_of(const Session& session) { return std::stoi(session.trial_name().substr(6)); }

/// Over all ranks: how often each did something, summed.
std::vector<std::int64_t> summed(std::vector<std::int64_t> counts) {
  world().all_reduce(std::span(counts));
  return counts;
}

Json json_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  return Json::parse(in);
}

class Sweeps : public testing::Test {
  void SetUp() override {
    if (std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) GTEST_SKIP() << "needs MPI_THREAD_MULTIPLE";
  }
};

TEST(SweepsWithoutThreads, AreRefused) {
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") == nullptr) GTEST_SKIP() << "MPI may be called by several threads";
  const auto ended = run({test::shared_folder()}, [](Session&, const Config&) {}, {}, {});
  EXPECT_EQ(ended.code, 64) << ended.said;
  EXPECT_NE(ended.said.find("MPI_THREAD_MULTIPLE"), std::string::npos) << ended.said;
}

TEST_F(Sweeps, EveryTrialIsARunWithItsOwnSettings) {
  const int size = world().size(), together = size == 1 ? 1 : size / 2;
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> worker_counts(6);
  const auto loop = [&](Session& session, const Config& config) {
    EXPECT_EQ(session.world_size(), together);
    EXPECT_EQ(config.at("other"), "kept");
    ++worker_counts[static_cast<std::size_t>(number_of(session))];
    const double value = config.at("a").get<double>() * config.at("o").at("b").get<double>();
    session.report({{"value", value}}, session.state({}));
  };
  const auto ended = run({storage, {"--progress", "plain"}}, loop, {{"a", 0}, {"o", {{"b", 0}}}, {"other", "kept"}},
                         {.space = {{"a", grid({1, 2})}, {"o.b", grid({10, 30, 20})}},
                          .ranks_per_trial = together,
                          .metric = "value",
                          .mode = ScoreOrder::max});
  ASSERT_EQ(ended.code, 0) << ended.said;
  const auto& sweep = *ended.sweep;
  EXPECT_EQ(summed(worker_counts), std::vector<std::int64_t>(6, together)) << "one group has each";
  EXPECT_EQ(statuses(ended), std::vector<TrialStatus>(6, TrialStatus::done));
  EXPECT_EQ(sweep.path, storage / "sweep");
  ASSERT_TRUE(sweep.best());
  EXPECT_EQ(sweep.best()->name, "trial_00004");
  EXPECT_EQ(sweep.best()->config, Json::parse(R"({"a": 2, "o": {"b": 30}})"));
  EXPECT_EQ(sweep.best()->metrics.at("value"), 60);
  ASSERT_TRUE(sweep.best()->checkpoint);
  EXPECT_EQ(sweep.best()->checkpoint->path(), storage / "sweep" / "trial_00004" / "checkpoint_000000");
  const auto params = json_in(storage / "sweep" / "trial_00004" / "params.json");
  EXPECT_EQ(params.at("train_loop_config"), Json::parse(R"({"a": 2, "o": {"b": 30}, "other": "kept"})"));
  EXPECT_EQ(params.at("finished"), true);
  const auto table = json_in(storage / "sweep" / "sweep.json");
  ASSERT_EQ(table.at("trials").size(), 6u);
  EXPECT_EQ(table.at("trials")[4].at("status"), "done");
  EXPECT_EQ(table.at("trials")[4].at("metrics").at("value"), 60);
  EXPECT_TRUE(std::filesystem::exists(storage / "sweep" / "sweep.csv"));
  EXPECT_NE(ended.said.find("\nbest: trial_00004 (a 2, o.b 30): done, value 60"), std::string::npos) << ended.said;
  EXPECT_EQ(ended.said.find("worker"), std::string::npos) << "trials write to their logs: " << ended.said;
}

TEST_F(Sweeps, AGroupTakesTheNextTrialWhenItIsFree) {
  if (world().size() == 1) GTEST_SKIP() << "needs another group";
  const auto storage = test::shared_folder();
  const auto status = [&](int trial) {
    const auto file = storage / "sweep" / ("trial_0000" + std::to_string(trial)) / "trial.json";
    return std::filesystem::exists(file) ? json_in(file).at("status").get<std::string>() : "";
  };
  const auto loop = [&](Session& session, const Config& config) {
    // The first is not done before all others are.
    for (int other = 1; number_of(session) == 0 && other < 6; ++other)
      while (status(other) != "done") std::this_thread::yield();
    count(session, config);
  };
  const auto ended = run({storage}, loop, {{"value", 0}}, {.space = {{"value", grid({0, 1, 2, 3, 4, 5})}}});
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended), std::vector<TrialStatus>(6, TrialStatus::done));
}

TEST_F(Sweeps, RanksThatAreLeftOverWait) {
  const int size = world().size();
  if (size < 3) GTEST_SKIP() << "nothing is left over";
  std::int64_t trials = 0;
  const auto ended =
      run({test::shared_folder()},
          [&](Session& session, const Config& config) {
            EXPECT_EQ(session.world_size(), 3);
            ++trials;
            count(session, config);
          },
          {{"value", 0}},
          {.space = {{"value", grid({1, 2})}}, .ranks_per_trial = 3, .metric = "value", .mode = ScoreOrder::max});
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(trials, world().rank() < 3 ? 2 : 0);
  EXPECT_EQ(ended.sweep->best()->name, "trial_00001") << "who waits has the same result";
}

TEST_F(Sweeps, ARankThatIsLeftOverPassesAStopOn) {
  const int size = world().size();
  if (size < 3) GTEST_SKIP() << "nothing is left over";
  const auto storage = test::shared_folder();
  const auto ended = launch({storage}, [&](Launch& whole) {
    const bool is_last = whole.rank() == size - 1;
    const auto saved = storage / "sweep" / "trial_00000" / "checkpoint_000000";
    Launch launch(whole, {.ranks = detail::comm::make_separate_world(whole.communicator()),
                          .flags = whole.flags(),
                          .asked_to_stop = [=] { return is_last && std::filesystem::exists(saved); }});
    TorchTrainer trainer(launch, [](Session& session) {
      std::int64_t epochs = 0;
      auto state = session.state({{"epochs", epochs}});
      for (;;) session.report({{"epochs", ++epochs}}, state);
    });
    return Sweep(launch, trainer.as_trainable(), {.space = {{"value", grid({1})}}, .ranks_per_trial = size - 1}).fit();
  });
  EXPECT_EQ(ended.code, 85) << ended.said;
  EXPECT_NE(ended.said.find("stopped on request, 1 of 1 trial is left"), std::string::npos) << ended.said;
}

TEST_F(Sweeps, WhatIsRandomComesFromTheSeedAndSamplesTrainWithTheirs) {
  std::vector<Json> drawn[3];
  for (int i = 0; i < 3; ++i) {
    std::vector<std::int64_t> seeds(3);
    const auto ended = run({test::shared_folder(), {"--seed", i < 2 ? "5" : "6"}},
                           [&](Session& session, const Config& config) {
                             seeds[static_cast<std::size_t>(number_of(session))] =
                                 static_cast<std::int64_t>(session.seed());
                             count(session, config);
                           },
                           {{"value", 0.0}}, {.space = {{"value", uniform(0, 1)}}, .num_samples = 3});
    ASSERT_EQ(ended.code, 0) << ended.said;
    for (const auto& trial : ended.sweep->trials) drawn[i].push_back(trial.config);
    if (i < 2) {
      EXPECT_EQ(summed(seeds), (std::vector<std::int64_t>{5, 6, 7}));
    }
  }
  EXPECT_EQ(drawn[0], drawn[1]);
  EXPECT_NE(drawn[0], drawn[2]);
}

TEST_F(Sweeps, TheSchedulerEndsThoseThatAreWorse) {
  // The first trial is the best, so each later one at a rung is worse.
  std::vector<Json> values;
  for (int i = 0; i < 8; ++i) values.push_back(i);
  const auto storage = test::shared_folder();
  const auto ended = run({storage}, [](Session& session, const Config& config) { count(session, config); },
                         {{"value", 0}, {"epochs", 100}},
                         {.space = {{"value", grid(values)}},
                          .metric = "value",
                          .mode = ScoreOrder::min,
                          .scheduler = asha({.grace_period = 2, .reduction_factor = 2, .max_t = 8})});
  ASSERT_EQ(ended.code, 0) << ended.said;
  const auto& trials = ended.sweep->trials;
  EXPECT_EQ(trials[0].status, TrialStatus::done);
  EXPECT_EQ(trials[0].metrics.at("epochs"), 8) << "max_t is enough";
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");
  EXPECT_EQ(trials[7].status, TrialStatus::stopped);
  EXPECT_EQ(trials[7].metrics.at("epochs"), 2) << "the grace period";
  int stopped = 0;
  for (const auto& trial : trials) {
    const std::int64_t epochs = trial.metrics.at("epochs");
    stopped += trial.status == TrialStatus::stopped;
    EXPECT_TRUE(trial.status == TrialStatus::stopped ? epochs == 2 || epochs == 4 : epochs == 8) << trial.name;
    EXPECT_FALSE(trial.error) << "that is as good as done";
  }
  EXPECT_GE(stopped, 8 - world().size()) << "of those that are not first anywhere";
  EXPECT_EQ(json_in(storage / "sweep" / "trial_00007" / "trial.json").at("status"), "stopped by the scheduler");
  EXPECT_EQ(json_in(storage / "sweep" / "trial_00007" / "params.json").at("finished"), true);
}

/// Trains each trial on one rank and validates its "value" as "score", on the other ranks if there are any. A report
/// waits until the validation of the one before is over; the first trial makes `reports_of_first`, and others 8.
Ended run_validated(int ranks_per_trial, const std::vector<Json>& values, int reports_of_first) {
  const auto storage = test::shared_folder();
  const auto train = [&](Session& session, const Config& config) {
    double value = config.at("value");
    auto state = session.state({{"value", value}});
    state.restore();
    for (int report = 0; report < (number_of(session) == 0 ? reports_of_first : 8); ++report) {
      session.report({{"report", report}}, state, {.validation = true});
      const auto checkpoint = "checkpoint_00000" + std::to_string(report);
      while (ranks_per_trial > 1 &&
             !std::filesystem::exists(storage / "sweep" / session.trial_name() / checkpoint / "validation.json"))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const auto validate = [](Session&, const Checkpoint& checkpoint) -> Config {
    double value = 0;
    checkpoint.load("value", value);
    return {{"score", value}};
  };
  return launch({storage}, [&](Launch& launch) {
    TorchTrainer trainer(launch, train,
                         {.train_loop_config = {{"value", 0.0}},
                          .scaling_config = {.num_workers = 1},
                          .validation = {.function = validate}});
    return Sweep(launch, trainer.as_trainable(),
                 {.space = {{"value", grid(values)}},
                  .ranks_per_trial = ranks_per_trial,
                  .metric = "score",
                  .mode = ScoreOrder::max,
                  .scheduler = asha({.grace_period = 1, .reduction_factor = 2, .max_t = 100})})
        .fit();
  });
}

TEST_F(Sweeps, TheSchedulerComparesWhatValidationsGive) {
  const bool some_validate = world().size() > 1;
  const auto ended = run_validated(some_validate ? 2 : 1, {4.0, 3.0, 2.0, 1.0}, 8);
  if (!some_validate) {
    EXPECT_EQ(ended.code, 64) << ended.said;
    return;
  }
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended)[0], TrialStatus::done) << "no other is better";
  EXPECT_EQ(statuses(ended)[3], TrialStatus::stopped);
  EXPECT_LT(ended.sweep->trials[3].metrics.at("report"), 7);
  EXPECT_EQ(ended.said.find("has no \"score\""), std::string::npos) << ended.said;
}

TEST_F(Sweeps, TheSchedulerComparesWithWhatValidationsGiveAfterTraining) {
  if (world().size() == 1) GTEST_SKIP() << "no rank validates";
  const auto ended = run_validated(world().size(), {2.0, 1.0}, 1);
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended), (std::vector{TrialStatus::done, TrialStatus::stopped})) << ended.said;
}

TEST_F(Sweeps, WhoFailsAtAComparisonDoesNotEscapeIt) {
  struct Fails final : Callback {
    void after_report(const std::vector<Json>&, const std::optional<Checkpoint>&) override {
      if (std::exchange(now, false)) throw std::runtime_error("the loss is a teapot");
    }
    bool now = false;
  };
  for (const int retries : {0, 1}) {
    const auto storage = test::shared_folder();
    const auto fails = std::make_shared<Fails>();
    bool armed = true;
    const auto loop = [&](Session& session, const Config& config) {
      std::int64_t epochs = 0;
      auto state = session.state({{"epochs", epochs}});
      state.restore();
      while (epochs < 9) {
        ++epochs;
        fails->now = armed && number_of(session) == 1 && epochs == 2;
        armed = armed && !fails->now;
        const Metrics metrics{{"value", config.at("value").get<double>()}};
        epochs == 2 ? session.report(metrics) : session.report(metrics, state);
      }
    };
    const auto both = [&] {
      return launch({storage}, [&](Launch& launch) {
        TorchTrainer trainer(launch, loop,
                             {.train_loop_config = {{"value", 0.0}},
                              .run_config = {.failure_config = {.max_failures = retries}, .callbacks = {fails}}});
        return Sweep(launch, trainer.as_trainable(),
                     {.space = {{"value", grid({2.0, 1.0})}},
                      .ranks_per_trial = world().size(),
                      .metric = "value",
                      .mode = ScoreOrder::max,
                      .scheduler = asha({.grace_period = 2, .reduction_factor = 2, .max_t = 4})})
            .fit();
      });
    };
    auto ended = both();
    if (retries == 0) {
      EXPECT_EQ(statuses(ended), (std::vector{TrialStatus::done, TrialStatus::failed})) << ended.said;
      ended = both();
    }
    EXPECT_EQ(statuses(ended), (std::vector{TrialStatus::done, TrialStatus::stopped})) << ended.said;
    EXPECT_EQ(ended.sweep->trials[1].metrics.at("training_iteration"), 2);
  }
}

TEST_F(Sweeps, AnExceptionEndsItsTrialAlone) {
  const int size = world().size(), together = size == 1 ? 1 : size / 2;
  const auto storage = test::shared_folder();
  bool mended = false;
  std::vector<std::int64_t> begun(6);
  const auto loop = [&](Session& session, const Config& config) {
    const int number = number_of(session);
    ++begun[static_cast<std::size_t>(number)];
    const bool last = session.world_rank() == session.world_size() - 1;
    count(session, config, [&](std::int64_t epoch) {
      if (!mended && number == 1 && epoch == 2 && last) throw std::runtime_error("the loss is a teapot");
      if (!mended && number == 4) throw Error(ExitCode::data, "reading the tea", "it is empty", "Fill it");
    });
  };
  const SweepOptions options{.space = {{"value", grid({5, 4, 3, 2, 1, 0})}},
                             .ranks_per_trial = together,
                             .metric = "value",
                             .mode = ScoreOrder::max};
  auto ended = run({storage}, loop, {{"value", 0}, {"epochs", 2}}, options);
  EXPECT_EQ(ended.code, 0) << ended.said;
  using enum TrialStatus;
  EXPECT_EQ(statuses(ended), (std::vector{done, failed, done, done, failed, done}));
  const auto& failed_trial = ended.sweep->trials[1];
  ASSERT_TRUE(failed_trial.error);
  EXPECT_EQ(failed_trial.error->code(), ExitCode::user_error);
  EXPECT_NE(std::string(failed_trial.error->what()).find("the loss is a teapot"), std::string::npos);
  EXPECT_EQ(failed_trial.metrics.at("epochs"), 1) << "its last report";
  EXPECT_EQ(ended.sweep->trials[4].error->code(), ExitCode::data);
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");

  // A second start retries the failed trials from their checkpoints.
  mended = true;
  begun.assign(6, 0);
  ended = run({storage}, loop, {{"value", 0}, {"epochs", 2}}, options);
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended), std::vector(6, done));
  EXPECT_EQ(summed(begun), (std::vector<std::int64_t>{0, together, 0, 0, together, 0}));
  EXPECT_EQ(ended.sweep->trials[1].metrics.at("training_iteration"), 2);
  EXPECT_FALSE(ended.sweep->trials[1].error);

  // And then nothing more.
  begun.assign(6, 0);
  ended = run({storage}, loop, {{"value", 0}, {"epochs", 2}}, options);
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(summed(begun), std::vector<std::int64_t>(6, 0));
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");
}

TEST_F(Sweeps, AnExceptionWaitsForThoseWhoCompute) {
  // If the failure ended the job, the others would have a moment to learn of it; here they are in a long step.
  const auto storage = test::shared_folder();
  const auto ended = launch({storage}, [&](Launch& launch) {
    detail::comm::set_final_grace(launch.communicator(), std::chrono::milliseconds(1));
    TorchTrainer trainer(launch,
                         [&](Session& session, const Config& config) {
                           if (number_of(session) == 0) {
                             if (session.world_rank() == session.world_size() - 1)
                               throw std::runtime_error("the loss is a teapot");
                             std::this_thread::sleep_for(std::chrono::milliseconds(300));
                           }
                           count(session, config);
                         },
                         {.train_loop_config = {{"value", 0}}});
    return Sweep(launch, trainer.as_trainable(),
                 {.space = {{"value", grid({0, 1, 2})}},
                  .ranks_per_trial = world().size(),
                  .metric = "value",
                  .mode = ScoreOrder::max})
        .fit();
  });
  EXPECT_EQ(ended.code, 0) << ended.said;
  using enum TrialStatus;
  EXPECT_EQ(statuses(ended), (std::vector{failed, done, done}));
  EXPECT_NE(std::string(ended.sweep->trials[0].error->what()).find("the loss is a teapot"), std::string::npos);
}

TEST_F(Sweeps, WhereNoTrialEndsWellTheFirstOnesErrorIsTheSweeps) {
  const auto ended =
      run({test::shared_folder()},
          [](Session&, const Config&) { throw Error(ExitCode::data, "reading the tea", "it is empty", "Fill it"); },
          {{"value", 0}}, {.space = {{"value", grid({1, 2, 3})}}});
  EXPECT_EQ(ended.code, 65) << ended.said;
  EXPECT_NE(ended.said.find("no trial has ended well; trial_00000: "), std::string::npos) << ended.said;
  EXPECT_EQ(statuses(ended), std::vector(3, TrialStatus::failed));
  EXPECT_FALSE(ended.sweep->best());
}

TEST_F(Sweeps, AStopIsThatOfAllTrialsAndTheSweepGoesOn) {
  const int size = world().size(), together = size == 1 ? 1 : size / 2;
  const auto storage = test::shared_folder();
  const auto file = storage / "sweep" / "stop";
  bool stops = true;
  std::vector<std::int64_t> first(8), last(8), to(8, 1'000'000'000);
  const auto loop = [&](Session& session, const Config& config) {
    const auto number = static_cast<std::size_t>(number_of(session));
    auto own = config;
    own["epochs"] = to[number];
    count(session, own, [&](std::int64_t epoch) {
      if (session.world_rank() != 0) return;
      if (first[number] == 0) first[number] = epoch;
      last[number] = epoch;
      if (stops && number == 0 && epoch == 2) std::ofstream(file) << "";
    });
  };
  const SweepOptions options{.space = {{"value", grid({0, 1, 2, 3, 4, 5, 6, 7})}},
                             .ranks_per_trial = together,
                             .metric = "value",
                             .mode = ScoreOrder::max};
  auto ended = run({storage}, loop, {{"value", 0}}, options);
  EXPECT_EQ(ended.code, 85) << ended.said;
  EXPECT_NE(ended.said.find("8 of 8 trials are left, state saved. Start it again with --name sweep"), std::string::npos)
      << ended.said;
  EXPECT_FALSE(std::filesystem::exists(file)) << "it stops one start";
  EXPECT_EQ(statuses(ended), std::vector(8, TrialStatus::waiting));
  const auto before = summed(last);
  EXPECT_GE(before[0], 2);
  EXPECT_EQ(before[7], 0) << "nothing begins after a stop";

  for (std::size_t i = 0; i < 8; ++i) to[i] = before[i] + 2;
  first.assign(8, 0);
  last.assign(8, 0);
  stops = false;
  ended = run({storage}, loop, {{"value", 0}}, options);
  const auto begun = summed(first), end = summed(last);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(begun[i], before[i] + 1) << "trial " << i << " goes on where it was saved";
    EXPECT_EQ(end[i], before[i] + 2);
  }
  EXPECT_EQ(ended.code, 0) << ended.said;
}

TEST_F(Sweeps, AtTheTimeLimitNothingBegins) {
  std::int64_t begun = 0;
  const auto ended = run({test::shared_folder(), {"--time-limit", "0"}}, [&](Session&, const Config&) { ++begun; },
                         {{"value", 0}}, {.space = {{"value", grid({1, 2})}}});
  EXPECT_EQ(ended.code, 75) << "nothing is saved: " << ended.said;
  EXPECT_EQ(begun, 0);
  EXPECT_EQ(statuses(ended), std::vector(2, TrialStatus::waiting));
}

TEST_F(Sweeps, OfATrialThatWasLostItsFolderTells) {
  const auto storage = test::shared_folder();
  const auto loop = [](Session& session, const Config& config) { count(session, config); };
  const Config defaults{{"value", 0}, {"epochs", 2}};
  const SweepOptions options{.space = {{"value", grid({5, 6})}}, .metric = "value", .mode = ScoreOrder::max};
  ASSERT_EQ(run({storage}, loop, defaults, options).code, 0);
  // trial.json as a killed start leaves it: written when the trial began.
  for (const char* name : {"trial_00000", "trial_00001"}) {
    const auto file = storage / "sweep" / name / "trial.json";
    if (world().rank() != 0) continue;
    auto row = json_in(file);
    row.update({{"status", "running"}, {"metrics", nullptr}, {"checkpoint", nullptr}});
    std::ofstream(file) << row;
  }
  world().barrier();
  const auto ended = run({storage, {"--time-limit", "0"}}, loop, defaults, options);
  EXPECT_EQ(ended.code, 85) << "state is saved: " << ended.said;
  EXPECT_EQ(statuses(ended), std::vector(2, TrialStatus::waiting));
  for (const auto& trial : ended.sweep->trials) {
    ASSERT_TRUE(trial.metrics.is_object()) << trial.name;
    EXPECT_EQ(trial.metrics.at("epochs"), 2);
    ASSERT_TRUE(trial.checkpoint) << trial.name;
    EXPECT_EQ(trial.checkpoint->path(), trial.path / "checkpoint_000001");
  }
}

TEST_F(Sweeps, ATrialWithNothingToSaveIsStoppedAndHasNotFailed) {
  const auto storage = test::shared_folder();
  const auto endless = [&](Session& session, const Config&) {
    if (session.world_rank() == 0) std::ofstream(storage / "sweep" / "stop") << "";
    for (;;) session.report({{"value", 1}});
  };
  const auto ended =
      run({storage}, endless, {{"value", 0}}, {.space = {{"value", grid({1, 2})}}, .ranks_per_trial = world().size()});
  EXPECT_EQ(ended.code, 75) << ended.said;
  EXPECT_EQ(statuses(ended), std::vector(2, TrialStatus::waiting));
}

TEST_F(Sweeps, MoreSamplesAddTrialsAndAnotherSpaceIsRefused) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> begun(4);
  const auto loop = [&](Session& session, const Config& config) {
    begun[static_cast<std::size_t>(number_of(session))] += session.world_rank() == 0;
    count(session, config);
  };
  const Config defaults{{"value", 0.0}};
  SweepOptions options{.space = {{"value", uniform(0, 1)}}, .num_samples = 2};
  EXPECT_EQ(run({storage}, loop, defaults, options).code, 0);
  options.num_samples = 4;
  EXPECT_EQ(run({storage}, loop, defaults, options).code, 0);
  EXPECT_EQ(summed(begun), (std::vector<std::int64_t>{1, 1, 1, 1}));
  for (const auto& job : {Job{storage, {"--seed", "1"}}, Job{storage, {"--resume", "never"}}})
    EXPECT_EQ(run(job, loop, defaults, options).code, 64) << job.flags[1];
  options.space = {{"value", uniform(0, 2)}};
  const auto other = run({storage}, loop, defaults, options);
  EXPECT_EQ(other.code, 64);
  EXPECT_NE(other.said.find("trial_00000 had the settings"), std::string::npos) << other.said;
  EXPECT_EQ(run({test::shared_folder(), {"--resume", "must"}}, loop, defaults, options).code, 65);
  EXPECT_EQ(run({test::shared_folder(), {"--resume", "never"}}, loop, defaults, options).code, 0);
}

TEST_F(Sweeps, WhatCannotBeIsSaidBeforeAnythingBegins) {
  const auto loop = [](Session&, const Config&) { FAIL() << "it has begun"; };
  const Config defaults{{"value", 0}};
  const Space space{{"value", grid({1})}};
  const auto ended = run({test::shared_folder()}, loop, defaults, {.space = space, .ranks_per_trial = 9});
  EXPECT_EQ(ended.code, 64);
  EXPECT_NE(ended.said.find("a trial needs 9 ranks and the launch has " + std::to_string(world().size())),
            std::string::npos)
      << ended.said;
  for (const auto& options : std::vector<SweepOptions>{
           {.space = space, .num_samples = 0},
           {.space = space, .ranks_per_trial = 0},
           {.space = space, .scheduler = asha()},
           {.space = space, .metric = "m", .mode = ScoreOrder::max, .scheduler = asha({.reduction_factor = 1})},
           {.space = space, .metric = "m", .mode = ScoreOrder::max, .scheduler = asha({.grace_period = 5, .max_t = 4})},
           {.space = {{"value", grid({1})}, {"value", grid({2})}}}})
    EXPECT_EQ(run({test::shared_folder()}, loop, defaults, options).code, 64);
  const auto folder = test::shared_folder();
  if (world().rank() == 0) std::ofstream(folder / "config.json") << R"({"value": 3})";
  world().barrier();
  for (const auto& flags : std::vector<std::vector<std::string>>{{"--set", "value=3"},
                                                                 {"--config", (folder / "config.json").string()},
                                                                 {"--workers", "1"},
                                                                 {"--resume", "somewhere"}})
    EXPECT_EQ(run({test::shared_folder(), flags}, loop, defaults, {.space = space}).code, 64) << flags[0];
  // Also by what is around it, or inside.
  const Config nested{{"o", {{"lr", 0.1}, {"decay", 0.1}}}};
  const auto code_with = [&](const std::string& set, const std::string& name, const Json& value) {
    const auto fixed = run({test::shared_folder(), {"--set", set}}, [](Session&, const Config&) {}, nested,
                           {.space = {{name, grid({value})}}});
    if (fixed.code == 64) {
      EXPECT_NE(fixed.said.find("--set " + set + " sets " + name), std::string::npos) << fixed.said;
    }
    return fixed.code;
  };
  EXPECT_EQ(code_with(R"(o={"lr": 0.5})", "o.lr", 1), 64);
  EXPECT_EQ(code_with("o=null", "o.lr", 1), 64);
  EXPECT_EQ(code_with("o.lr=0.5", "o", {{"lr", 1}}), 64);
  EXPECT_EQ(code_with(R"(o={"decay": 0.5})", "o.lr", 1), 0);
  EXPECT_EQ(code_with("o.decay=0.5", "o.lr", 1), 0);
}

TEST_F(Sweeps, AnUnknownSettingAndAMetricThatNobodyReportsAreErrors) {
  const auto loop = [](Session& session, const Config& config) { count(session, config); };
  auto ended = run({test::shared_folder()}, loop, {{"value", 0}}, {.space = {{"valeu", grid({1, 2})}}});
  EXPECT_EQ(ended.code, 64);
  EXPECT_NE(ended.said.find("Did you mean \"value\""), std::string::npos) << ended.said;
  ended = run({test::shared_folder()}, loop, {{"value", 0}},
              {.space = {{"value", grid({1})}}, .metric = "valeu", .mode = ScoreOrder::max});
  EXPECT_EQ(ended.code, 64);
  EXPECT_NE(ended.said.find("none has reported \"valeu\", but epochs, value"), std::string::npos) << ended.said;
}

/// Reports the values of {"values": …}, one for each report; null: a report without the metric.
void report_values(Session& session, const Config& config) {
  std::int64_t reports = 0;
  auto state = session.state({{"reports", reports}});
  state.restore();
  for (const auto& values = config.at("values"); reports < static_cast<std::int64_t>(values.size());) {
    const auto& value = values[static_cast<std::size_t>(reports++)];
    Metrics metrics{{"reports", reports}};
    if (!value.is_null()) metrics.emplace("value", value.get<double>());
    session.report(metrics, state);
  }
}

TEST_F(Sweeps, TheLastReportedValueCountsWithItsReport) {
  const auto storage = test::shared_folder();
  const std::vector<Json> values{{1, nullptr, 5, nullptr}, {9, nullptr, 3, nullptr}, {4, nullptr, 4, 4}};
  SweepOptions options{.space = {{"values", grid(values)}}, .metric = "value", .mode = ScoreOrder::min};
  const auto start = [&] { return run({storage, {"--progress", "plain"}}, report_values, {{"values", {1}}}, options); };
  auto ended = start();
  ASSERT_EQ(ended.code, 0) << ended.said;
  ASSERT_TRUE(ended.sweep->best());
  EXPECT_EQ(ended.sweep->best()->name, "trial_00001");
  EXPECT_EQ(ended.sweep->best()->metrics.at("value"), 3);
  EXPECT_EQ(ended.sweep->best()->metrics.at("training_iteration"), 3);
  EXPECT_NE(ended.said.find("done, value 3 at report 3"), std::string::npos) << ended.said;
  EXPECT_EQ(json_in(storage / "sweep" / "sweep.json").at("trials")[0].at("metrics").at("value"), 5);
  // By another metric other reports count, without training again.
  options.metric = "reports";
  ended = start();
  ASSERT_EQ(ended.code, 0) << ended.said;
  for (const auto& trial : ended.sweep->trials) EXPECT_EQ(trial.metrics.at("reports"), 4) << trial.name;
}

TEST_F(Sweeps, TheSchedulersLastValueCountsToo) {
  // The first trial goes on to a report without the metric; the second one is ended at its first report.
  const std::vector<Json> values{{1, nullptr}, {9, nullptr}};
  const auto ended = run({test::shared_folder()}, report_values, {{"values", {1}}},
                         {.space = {{"values", grid(values)}},
                          .ranks_per_trial = world().size(),
                          .metric = "value",
                          .mode = ScoreOrder::min,
                          .scheduler = asha({.reduction_factor = 2})});
  ASSERT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended), (std::vector{TrialStatus::done, TrialStatus::stopped}));
  ASSERT_TRUE(ended.sweep->best());
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");
}

TEST_F(Sweeps, AMetricThatNeverComesEndsTheSweepAfterItsFirstTrial) {
  std::vector<std::int64_t> begun(3);
  const auto storage = test::shared_folder();
  SweepOptions options{.space = {{"value", grid({1, 2, 3})}},
                       .ranks_per_trial = world().size(),
                       .metric = "loss",
                       .mode = ScoreOrder::min,
                       .scheduler = asha()};
  const auto start = [&] {
    return run(
        {storage},
        [&](Session& session, const Config& config) {
          begun[static_cast<std::size_t>(number_of(session))] += session.world_rank() == 0;
          count(session, config);
        },
        {{"value", 0}}, options);
  };
  auto ended = start();
  EXPECT_EQ(ended.code, 64) << ended.said;
  EXPECT_NE(ended.said.find("none has reported \"loss\", but epochs, value"), std::string::npos) << ended.said;
  EXPECT_EQ(summed(begun), (std::vector<std::int64_t>{1, 0, 0}));
  // Nothing was decided by it, so the right one may follow.
  options.metric = "value";
  ended = start();
  EXPECT_EQ(ended.code, 0) << ended.said;
  ASSERT_TRUE(ended.sweep->best());
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");
}

TEST_F(Sweeps, AMetricThatIsNeverANumberIsAnError) {
  std::vector<std::int64_t> begun(3), reports(3);
  const SweepOptions options{.space = {{"value", grid({1, 2, 3})}},
                             .ranks_per_trial = world().size(),
                             .metric = "score",
                             .mode = ScoreOrder::max,
                             .scheduler = asha({.reduction_factor = 2, .max_t = 8})};
  const auto start = [&](const Metric& score) {
    begun = reports = std::vector<std::int64_t>(3);
    return run(
        {test::shared_folder()},
        [&](Session& session, const Config& config) {
          const auto trial = static_cast<std::size_t>(number_of(session));
          const bool counts = session.world_rank() == 0;
          begun[trial] += counts;
          for (int report = 0; report < 8; ++report) {
            reports[trial] += counts;
            session.report({{"score", score}, {"value", config.at("value").get<double>()}});
          }
        },
        {{"value", 0}}, options);
  };
  const auto text = start(Json("high"));
  EXPECT_EQ(text.code, 64) << text.said;
  EXPECT_NE(text.said.find("none has a number as its \"score\", but value. Report a number"), std::string::npos)
      << text.said;
  EXPECT_EQ(summed(begun), (std::vector<std::int64_t>{1, 0, 0})) << "the others would train for nothing";
  const auto nan = start(std::nan(""));
  EXPECT_EQ(nan.code, 64) << nan.said;
  EXPECT_NE(nan.said.find("none has a number as its \"score\""), std::string::npos) << nan.said;
  EXPECT_EQ(summed(reports), (std::vector<std::int64_t>{8, 1, 1})) << "only the first one goes on";
}

TEST_F(Sweeps, AnyFunctionIsATrainable) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> places;
  const auto fit = [&](Launch& launch, const Config& config) -> Result {
    EXPECT_EQ(launch.size(), 1);
    EXPECT_EQ(launch.local_process_index(), world().topology().local_rank) << "which GPU it has";
    if (config.at("value") == 1 && launch.rank() == 0) throw std::runtime_error("not this one");
    return TorchTrainer(launch, [&](Session& session) { count(session, config); }).fit();
  };
  const auto ended = launch({storage}, [&](Launch& launch) {
    return Sweep(launch, fit, {.space = {{"value", grid({0, 1, 2})}}, .metric = "value", .mode = ScoreOrder::max})
        .fit();
  });
  EXPECT_EQ(ended.code, 0) << ended.said;
  using enum TrialStatus;
  EXPECT_EQ(statuses(ended), (std::vector{done, failed, done}));
  EXPECT_EQ(ended.sweep->best()->name, "trial_00002");
}

TEST_F(Sweeps, AValidationThatFailsInTheFirstTrialDoesNotEndTheSweep) {
  const auto start = [](const std::vector<Json>& values) {
    const auto train = [](Session& session, const Config& config) {
      double value = config.at("value");
      auto state = session.state({{"value", value}});
      session.report({{"loss", 1.0}}, state, {.validation = true});
    };
    const auto validate = [](Session&, const Checkpoint& checkpoint) -> Config {
      double value = 0;
      checkpoint.load("value", value);
      if (value == 0) throw std::runtime_error("no such file");
      return {{"score", value}};
    };
    return launch({test::shared_folder()}, [&](Launch& launch) {
      TorchTrainer trainer(launch, train,
                           {.train_loop_config = {{"value", 0.0}}, .validation = {.function = validate}});
      return Sweep(launch, trainer.as_trainable(),
                   {.space = {{"value", grid(values)}},
                    .ranks_per_trial = world().size(),
                    .metric = "score",
                    .mode = ScoreOrder::max})
          .fit();
    });
  };
  const auto ended = start({0.0, 1.0});
  EXPECT_EQ(ended.code, 0) << ended.said;
  ASSERT_TRUE(ended.sweep && ended.sweep->best()) << ended.said;
  EXPECT_EQ(ended.sweep->best()->name, "trial_00001");
  const auto all_fail = start({0.0});
  EXPECT_EQ(all_fail.code, 64);
  EXPECT_NE(all_fail.said.find("mend the validation, which has failed in some trials"), std::string::npos)
      << all_fail.said;
}

TEST_F(Sweeps, ATrialThatStopsForItselfDoesNotStopTheOthers) {
  const auto fit = [](Launch& launch, const Config& config) -> Result {
    if (config.at("value") == 0) throw Error(ExitCode::stopped, "validating", "not all is validated");
    return TorchTrainer(launch, [&](Session& session) { count(session, config); }).fit();
  };
  const auto ended = launch({test::shared_folder()}, [&](Launch& launch) {
    return Sweep(launch, fit,
                 {.space = {{"value", grid({0, 1})}},
                  .ranks_per_trial = world().size(),
                  .metric = "value",
                  .mode = ScoreOrder::max})
        .fit();
  });
  EXPECT_EQ(ended.code, 85) << ended.said;
  EXPECT_EQ(statuses(ended), (std::vector{TrialStatus::waiting, TrialStatus::done})) << ended.said;
  EXPECT_NE(ended.said.find("trial_00000: validating: not all is validated"), std::string::npos) << ended.said;
  EXPECT_NE(ended.said.find("1 of 2 trials stopped without a request"), std::string::npos) << ended.said;
}

TEST_F(Sweeps, ATrainableMayBeDoneBeforeItsRun) {
  const auto fit = [](Launch& launch, const Config& config) -> Result {
    if (config.at("value") == 0) throw Error(ExitCode::done, "there is nothing to train");
    return TorchTrainer(launch, [&](Session& session) { count(session, config); }).fit();
  };
  const auto ended = launch({test::shared_folder()}, [&](Launch& launch) {
    return Sweep(launch, fit,
                 {.space = {{"value", grid({0, 1})}},
                  .ranks_per_trial = world().size(),
                  .metric = "value",
                  .mode = ScoreOrder::max})
        .fit();
  });
  EXPECT_EQ(ended.code, 0) << ended.said;
  ASSERT_EQ(statuses(ended), std::vector(2, TrialStatus::done)) << ended.said;
  EXPECT_TRUE(ended.sweep->trials[0].metrics.is_null()) << "it has no report";
  EXPECT_EQ(ended.sweep->best()->name, "trial_00001");
}

TEST_F(Sweeps, WhatTheSweepCannotWriteEndsIt) {
  // A file has the name of the last trial's folder.
  const auto storage = test::shared_folder();
  const auto loop = [](Session& session, const Config& config) { count(session, config); };
  if (world().rank() == 0) {
    std::filesystem::create_directory(storage / "sweep");
    std::ofstream(storage / "sweep" / "trial_00003") << "";
  }
  world().barrier();
  const SweepOptions options{.space = {{"value", grid({0, 1, 2, 3, 4, 5})}}};
  EXPECT_NE(run({storage}, loop, {{"value", 0}}, options).code, 0);
  world().barrier();
  if (world().rank() == 0) std::filesystem::remove(storage / "sweep" / "trial_00003");
  world().barrier();
  const auto ended = run({storage}, loop, {{"value", 0}}, options);
  EXPECT_EQ(ended.code, 0) << ended.said;
  EXPECT_EQ(statuses(ended), std::vector(6, TrialStatus::done));
}

TEST_F(Sweeps, OtherSettingsOrAnotherSeedAreRefused) {
  const auto storage = test::shared_folder();
  std::int64_t trained = 0;
  const auto loop = [&](Session& session, const Config& config) {
    ++trained;
    count(session, config);
  };
  const Config defaults{{"value", 0}, {"epochs", 1}, {"o", {{"lr", 0.5}}}};
  const SweepOptions options{.space = {{"value", grid({1, 2})}}, .metric = "value", .mode = ScoreOrder::max};
  const auto start = [&](std::vector<std::string> flags, const Config& of_program) {
    return run({storage, std::move(flags)}, loop, of_program, options);
  };
  ASSERT_EQ(start({"--seed", "4"}, defaults).code, 0);
  const auto kept = json_in(storage / "sweep" / "sweep.json");
  EXPECT_EQ(kept.at("settings"), Json::parse(R"({"epochs": 1, "o": {"lr": 0.5}})")) << "but what the space chooses";
  trained = 0;
  const auto refused = [&](const Ended& ended, const std::string& fact) {
    EXPECT_EQ(ended.code, 64) << ended.said;
    EXPECT_NE(ended.said.find(fact), std::string::npos) << fact << " in: " << ended.said;
    EXPECT_EQ(json_in(storage / "sweep" / "sweep.json"), kept) << "nothing has changed";
  };
  refused(start({"--seed", "4", "--set", "epochs=5"}, defaults), "\"epochs\" was 1 and would now be 5");
  refused(start({"--seed", "5"}, defaults), "the seed was 4 and would now be 5");
  auto other = defaults;
  other["o"]["lr"] = 0.25;
  refused(start({"--seed", "4"}, other), "\"o.lr\" was 0.5 and would now be 0.25");
  other = defaults;
  other["more"] = true;
  refused(start({"--seed", "4"}, other), "\"more\"");
  // The same space written differently, and another default of a chosen setting.
  other = defaults;
  other["value"] = 7;
  EXPECT_EQ(start({"--seed", "4", "--set", "epochs=1"}, other).code, 0);
  EXPECT_EQ(world().all_reduce(trained), 0) << "all is done";
}

TEST_F(Sweeps, GoesOnWithItsSeedWithoutSeed) {
  const auto storage = test::shared_folder();
  SweepOptions options{.space = {{"value", uniform(0, 1)}}, .num_samples = 2};
  const auto start = [&](std::vector<std::string> flags) {
    return run(
        {storage, std::move(flags)}, [](Session& session, const Config& config) { count(session, config); },
        {{"value", 0.0}}, options);
  };
  const auto first = start({"--seed", "4"});
  ASSERT_EQ(first.code, 0) << first.said;
  options.num_samples = 3;
  const auto next = start({});
  ASSERT_EQ(next.code, 0) << next.said;
  for (std::size_t trial = 0; trial < 2; ++trial)
    EXPECT_EQ(next.sweep->trials[trial].config, first.sweep->trials[trial].config);
  EXPECT_EQ(json_in(storage / "sweep" / "sweep.json").at("seed"), 4);
  EXPECT_EQ(json_in(storage / "sweep" / "trial_00002" / "params.json").at("seed"), 4 + 2) << "of its sample";
  world().barrier();                                                                 // all have read it
  if (world().rank() == 0) std::ofstream(storage / "sweep" / "sweep.json").close();  // empty
  world().barrier();
  const auto again = start({"--seed", "4"});
  EXPECT_EQ(again.code, 0) << again.said;
  EXPECT_EQ(json_in(storage / "sweep" / "sweep.json").at("trials").size(), 3u) << "written again";
  EXPECT_EQ(start({"--seed", "0"}).code, 64) << "another seed is still refused";
}

TEST_F(Sweeps, TrialsKeepTheSettingsThatWereDrawnFirst) {
  const auto storage = test::shared_folder();
  SweepOptions options{.space = {{"value", log_uniform(1, 2)}}};
  const auto start = [&] {
    return run(
        {storage}, [](Session& session, const Config& config) { count(session, config); }, {{"value", 0.0}}, options);
  };
  ASSERT_EQ(start().code, 0);
  // As if drawn where log() rounds otherwise.
  const auto file = storage / "sweep" / "trial_00000" / "trial.json";
  auto row = json_in(file);
  row["config"]["value"] = std::nextafter(row["config"]["value"].get<double>(), 3.0);
  world().barrier();
  if (world().rank() == 0) std::ofstream(file) << row;
  world().barrier();
  options.num_samples = 2;
  const auto next = start();
  ASSERT_EQ(next.code, 0) << next.said;
  EXPECT_EQ(next.sweep->trials[0].config, row.at("config"));
  options.space = {{"value", log_uniform(1, 3)}};
  EXPECT_EQ(start().code, 64) << "another space is still refused";
}

TEST_F(Sweeps, TextsOfSetAreComparedForATrainableOfOnesOwn) {
  const auto storage = test::shared_folder();
  const auto fit = [](Launch& launch, const Config& config) -> Result {
    return TorchTrainer(launch, [](Session& session, const Config& own) { count(session, own); },
                        {.train_loop_config = {{"value", config.at("value")}, {"kind", ""}}})
        .fit();
  };
  const auto start = [&](std::vector<std::string> flags) {
    return launch({storage, std::move(flags)}, [&](Launch& launch) {
      return Sweep(launch, fit, {.space = {{"value", grid({1, 2})}}}).fit();
    });
  };
  ASSERT_EQ(start({"--set", "kind=adam"}).code, 0);
  EXPECT_EQ(json_in(storage / "sweep" / "sweep.json").at("settings"), Json({{"kind", "adam"}}));
  const auto other = start({"--set", "kind=sgd"});
  EXPECT_EQ(other.code, 64);
  EXPECT_NE(other.said.find("the setting \"kind\" was \"adam\" and would now be \"sgd\""), std::string::npos)
      << other.said;
  EXPECT_EQ(start({"--set", "kind=adam"}).code, 0);
  // As it was once kept.
  if (world().rank() == 0) {
    auto kept = json_in(storage / "sweep" / "sweep.json");
    kept["settings"]["kind"] = nullptr;
    std::ofstream(storage / "sweep" / "sweep.json") << kept;
  }
  world().barrier();
  EXPECT_EQ(start({"--set", "kind=sgd"}).code, 0);
  EXPECT_EQ(start({"--set", "kind=adam"}).code, 64) << "kept now";
  // A list has no names to set.
  if (world().rank() == 0) std::ofstream(storage / "list.json") << "[1]";
  world().barrier();
  const auto list = start({"--config", (storage / "list.json").string(), "--set", "kind=adam"});
  EXPECT_EQ(list.code, 65);
  EXPECT_NE(list.said.find("it is not a JSON object"), std::string::npos) << list.said;
}

TEST_F(Sweeps, AMetricThatATrainableAddsToItsResultCounts) {
  // Only the first trial has it, and no row.
  const auto start = [&](const char* metric) {
    return launch({test::shared_folder()}, [&](Launch& launch) {
      const auto fit = [](Launch& part, const Config& config) -> Result {
        auto result = TorchTrainer(part, [](Session& session) { session.report({{"loss", 1.0}}); }).fit();
        if (config.at("value") == 0) result.metrics["score"] = 0.5;
        return result;
      };
      return Sweep(launch, fit,
                   {.space = {{"value", grid({0, 1, 2})}},
                    .ranks_per_trial = world().size(),
                    .metric = metric,
                    .mode = ScoreOrder::max})
          .fit();
    });
  };
  const auto ended = start("score");
  EXPECT_EQ(ended.code, 0) << ended.said;
  ASSERT_TRUE(ended.sweep && ended.sweep->best());
  EXPECT_EQ(ended.sweep->best()->name, "trial_00000");
  const auto misspelt = start("scroe");
  EXPECT_EQ(misspelt.code, 64);
  EXPECT_NE(misspelt.said.find("none has reported \"scroe\", but loss, score"), std::string::npos) << misspelt.said;
}

TEST_F(Sweeps, ASecondSweepOfTheProgramIsAnother) {
  const auto storage = test::shared_folder();
  std::vector<double> best;
  for (int start = 0; start < 2; ++start) {
    const auto ended = launch({storage}, [&](Launch& launch) {
      SweepResult sweep;
      for (const double fold : {0.0, 100.0}) {
        TorchTrainer trainer(launch, [](Session& session, const Config& config) { count(session, config); });
        sweep = Sweep(launch, trainer.as_trainable(),
                      {.space = {{"value", grid({fold, fold + 1})}}, .metric = "value", .mode = ScoreOrder::max})
                    .fit();
        best.push_back(sweep.best()->metrics.at("value").get<double>());
      }
      return sweep;
    });
    EXPECT_EQ(ended.code, 0) << ended.said;
    EXPECT_EQ(ended.sweep->path.filename(), "sweep_2");
  }
  EXPECT_EQ(best, (std::vector<double>{1, 101, 1, 101}));
}

TEST_F(Sweeps, AnotherSchedulerIsRefused) {
  const auto storage = test::shared_folder();
  const auto start = [&](std::int64_t max_t) {
    return run({storage}, [](Session& session, const Config& config) { count(session, config); },
               {{"value", 0}, {"epochs", 3}},
               {.space = {{"value", grid({1})}},
                .metric = "value",
                .mode = ScoreOrder::max,
                .scheduler = asha({.max_t = max_t})});
  };
  EXPECT_EQ(start(2).code, 0);
  const auto other = start(3);
  EXPECT_EQ(other.code, 64);
  EXPECT_NE(other.said.find("the scheduler was "), std::string::npos) << other.said;
  EXPECT_EQ(start(2).code, 0);
}

TEST_F(Sweeps, AnotherMetricOrModeIsRefusedOnceTheSchedulerHasCompared) {
  const auto storage = test::shared_folder();
  SweepOptions options{.space = {{"value", grid({1, 2})}},
                       .ranks_per_trial = world().size(),
                       .metric = "value",
                       .mode = ScoreOrder::min,
                       .scheduler = asha({.reduction_factor = 2})};
  const auto start = [&] {
    return run(
        {storage}, [](Session& session, const Config& config) { count(session, config); },
        {{"value", 0}, {"epochs", 3}}, options);
  };
  const auto first = start();
  ASSERT_EQ(statuses(first), (std::vector{TrialStatus::done, TrialStatus::stopped})) << first.said;
  const auto kept = json_in(storage / "sweep" / "sweep.json");
  const auto refuse = [&](const std::string& fact) {
    const auto ended = start();
    EXPECT_EQ(ended.code, 64) << ended.said;
    EXPECT_NE(ended.said.find(fact), std::string::npos) << fact << " in: " << ended.said;
    EXPECT_EQ(json_in(storage / "sweep" / "sweep.json"), kept) << "nothing has changed";
  };
  options.mode = ScoreOrder::max;
  refuse("compared trials by the min of \"value\" and would now compare them by the max of \"value\"");
  options.mode = ScoreOrder::min;
  options.metric = "epochs";
  refuse("compared trials by the min of \"value\" and would now compare them by the min of \"epochs\"");
  options.metric = "value";
  EXPECT_EQ(start().code, 0);
}

TEST_F(Sweeps, OptionsThatDifferBetweenRanksAreRefused) {
  const bool is_last = world().rank() > 0 && world().rank() == world().size() - 1;
  const SweepOptions same{.space = {{"value", uniform(0, 1)}}, .metric = "value", .mode = ScoreOrder::max};
  const std::vector<std::pair<std::string, std::function<void(SweepOptions&)>>> changes{
      {"metric", [](auto& options) { options.metric = "epochs"; }},
      {"mode", [](auto& options) { options.mode = ScoreOrder::min; }},
      {"num_samples", [](auto& options) { options.num_samples = 2; }},
      {"scheduler", [](auto& options) { options.scheduler = asha(); }},
      {"space",
       [](auto& options) {
         options.space = {{"value", uniform(0, 2)}};
       }},
  };
  for (const auto& [option, change] : changes) {
    auto options = same;
    if (is_last) change(options);
    const auto ended = run(
        {test::shared_folder()}, [](Session& s, const Config& c) { count(s, c); }, {}, options);
    EXPECT_EQ(ended.code, world().size() > 1 ? 64 : 0) << ended.said;
    EXPECT_EQ(
        ended.said.find("comparing the options of the sweep on all ranks: " + option + " is ") != std::string::npos,
        world().size() > 1)
        << ended.said;
  }
}

TEST_F(Sweeps, FewerSamplesThanBeforeAreRefused) {
  const auto storage = test::shared_folder();
  const auto start = [&](int samples) {
    return run({storage}, [](Session& session, const Config& config) { count(session, config); }, {{"value", 0}},
               {.space = {{"value", grid({1})}}, .num_samples = samples, .metric = "value", .mode = ScoreOrder::max});
  };
  ASSERT_EQ(start(2).code, 0);
  const auto fewer = start(1);
  EXPECT_EQ(fewer.code, 64);
  EXPECT_NE(fewer.said.find("trials that are done would be left out: num_samples was 2 and is 1"), std::string::npos)
      << fewer.said;
  const auto more = start(3);
  EXPECT_EQ(more.code, 0) << more.said;
  EXPECT_EQ(statuses(more), std::vector(3, TrialStatus::done));
}

TEST_F(Sweeps, ARunOfTheSameNameMayFollow) {
  const auto storage = test::shared_folder();
  std::int64_t trained = 0, last_value = 0;
  const auto both = [&](Launch& launch) {
    const auto loop = [&](Session& session, const Config& config) {
      ++trained;
      last_value = config.at("value");
      count(session, config);
    };
    TorchTrainer trainer(launch, loop, {.train_loop_config = {{"value", 0}}});
    auto sweep = Sweep(launch, trainer.as_trainable(),
                       {.space = {{"value", grid({1, 3, 2})}}, .metric = "value", .mode = ScoreOrder::max})
                     .fit();
    TorchTrainer last(launch, loop, {.train_loop_config = sweep.best()->config});
    EXPECT_FALSE(last.fit().error);
    return sweep;
  };
  EXPECT_EQ(launch({storage}, both).code, 0);
  EXPECT_EQ(last_value, 3);
  trained = 0;
  const auto again = launch({storage}, both);
  EXPECT_EQ(again.code, 0) << again.said;
  EXPECT_EQ(trained, 0) << "all is done";
}

}  // namespace
}  // namespace muster::sweep_test
