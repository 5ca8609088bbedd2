// Operators whose calls are interrupted, ended or resumed, and ranks that disagree.
#include "muster/operator.hpp"

#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "rows/operator_program.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::operator_again_test {
namespace {

namespace fs = std::filesystem;
using test::all_ranks;
using test::expect_error;
using test::line;
using test::on_all;
using test::Pairs;
using test::program;
using test::storage;
using test::world;

Json params_of(const std::string& name) {
  std::ifstream file(storage() / name / "params.json");
  return Json::parse(file);
}

int even(const Launch& launch, int samples) { return (samples + launch.size() - 1) / launch.size(); }

/// y = 3x − 1, with noise from torch's generator.
struct Noisy : TrainingOperator {
  torch::nn::Linear net{nullptr};
  std::vector<double> seen = {};  ///< the first sample of each batch, here
  std::int64_t fails_at = -1;
  void setup(const Config& config) override {
    net = torch::nn::Linear(1, 1);
    register_training(Components{.models = net,
                                 .optimizers = torch::optim::SGD(net->parameters(), config.value("lr", 0.05)),
                                 .criterion = [](const at::Tensor& output, const at::Tensor& target) {
                                   return (output + 0.1 * at::randn_like(output) - target).square().mean();
                                 }});
    register_data({line(), {.batch_size = config.value("batch_size", 4), .shuffle = true}},
                  OperatorLoader(line(), {.batch_size = 8}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    if (info.global_step == fails_at) throw std::runtime_error("no luck with this one");
    seen.push_back(batch["x"][0].item<double>());
    return TrainingOperator::train_batch(batch, info);
  }
};

double weight_of(OperatorTrainerBase& trainer) {
  return trainer.state_dict().tensors.at("model/weight").item<double>();
}

// --- Other data between two calls ---

struct Curriculum : TrainingOperator {
  std::vector<double> seen = {};
  void setup(const Config&) override { give(0); }
  void give(double first) {
    const auto x = first + at::arange(4 * session().world_size(), at::kFloat);
    const auto data = Dataset::from_tensors({{"x", x}, {"y", x}});
    register_data({data, {.batch_size = 1}}, OperatorLoader(data, {.batch_size = 4}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    seen.push_back(batch["x"][0].item<double>());
    if (config().value("inside", false)) give(0);
    return {{"m", static_cast<double>(info.batch_idx)}, {"num_samples", batch.size()}};
  }
  Metrics validate_batch(Batch& batch, const BatchInfo&) override {
    return {{"least", batch["x"].min().item<double>()}, {"num_samples", batch.size()}};
  }
};

TEST(Operators, TakeOtherDataInThePlaceOfAPassUnderWay) {
  EXPECT_EQ(program({"--name", "curriculum"},
                    [](Launch& launch) {
                      OperatorTrainer<Curriculum> trainer(launch, {.num_workers = launch.size()});
                      trainer.train({.num_steps = 1});
                      trainer.apply_all_operators([](Curriculum& its) { return its.give(100), Json(); });
                      const auto row = trainer.train();
                      EXPECT_EQ(row.at("epoch"), 2);
                      const auto seen = trainer.apply_all_operators([](Curriculum& its) { return Json(its.seen); });
                      for (const auto& of_rank : seen) {
                        ASSERT_EQ(of_rank.size(), 5u) << "one of the first data, then all of the others";
                        EXPECT_LT(of_rank[0], 100);
                        for (std::size_t i = 1; i < 5; ++i) EXPECT_GE(of_rank[i], 100);
                      }
                      EXPECT_GE(trainer.validate().at("least"), 100);
                    }),
            0);
  const auto inside = static_cast<int>(ExitCode::user_error);
  EXPECT_EQ(
      program(
          {"--name", "inside"},
          [](Launch& launch) {
            OperatorTrainer<Curriculum> trainer(launch, {.config = {{"inside", true}}, .num_workers = launch.size()});
            trainer.train();
          }),
      inside);
}

TEST(Operators, ARegistrationBetweenCallsIsMadeAgain) {
  const auto learn = [](Launch& launch, std::int64_t fails_at) {
    OperatorTrainer<Noisy> trainer(launch, all_ranks(launch));
    for (int round = 0; round < 3; ++round) {
      trainer.train({.num_steps = 2});
      trainer.apply_all_operators([&](Noisy& its) {
        const auto x = at::linspace(2, 3, 8).view({8, 1}) + round;
        const auto data = Dataset::from_tensors({{"x", x}, {"y", x - 1}});
        its.register_data({data, {.batch_size = 2, .shuffle = true}});
        return Json(round);
      });
      trainer.apply_all_operators([&](Noisy& its) { return its.fails_at = fails_at, Json(); });
      trainer.train({.num_steps = 3});
    }
    return weight_of(trainer);
  };
  double undisturbed = 0, again = 0;
  EXPECT_EQ(program({"--name", "registers"}, [&](Launch& launch) { undisturbed = learn(launch, -1); }), 0);
  for (const std::int64_t fails_at : {3, 12}) {
    const auto name = "registers_" + std::to_string(fails_at);
    EXPECT_NE(program({"--name", name}, [&](Launch& launch) { learn(launch, fails_at); }), 0);
    EXPECT_EQ(program({"--name", name}, [&](Launch& launch) { again = learn(launch, -1); }), 0);
    EXPECT_EQ(again, undisturbed) << "failed at step " << fails_at;
  }
}

/// Registers other training data between two calls of train(), and then fails if asked to: at once, before anything is
/// saved, or in the batch of that number.
struct Changing : Noisy {
  void setup(const Config& config) override {
    Noisy::setup(config);
    give(config.value("first", 12), 0);
  }
  void give(int samples, int offset) {
    const auto x = at::arange(offset, offset + samples, at::kFloat).view({samples, 1}) / 100;
    register_data({Dataset::from_tensors({{"x", x}, {"y", x - 1}}), {.batch_size = 1}});
  }
};

TEST(Operators, NewDataEndAPassThatAResumedRunWouldContinue) {
  const int ranks = world().size();
  const auto learn = [&](Launch& launch, int samples, std::int64_t fails_at, bool fails_at_once) {
    OperatorTrainer<Changing> trainer(launch, {.config = {{"first", 6 * ranks}}, .num_workers = launch.size()});
    Json rows = Json::array();
    rows.push_back(trainer.train({.num_steps = 2}));
    trainer.apply_all_operators([&](Changing& its) { return its.give(samples, 100), Json(); });
    trainer.apply_all_operators([&](Changing& its) { return its.fails_at = fails_at, Json(); });
    if (fails_at_once) throw std::runtime_error("failed by the test");
    for (const auto steps : {std::optional<std::int64_t>(1), std::optional<std::int64_t>(), {}})
      rows.push_back(trainer.train({.num_steps = steps}));
    for (auto& row : rows)
      for (const char* const key : {"train_loss", "last_train_loss"}) row.erase(key);
    return std::pair(weight_of(trainer), rows);
  };
  for (const int samples : {6 * ranks, 4 * ranks}) {
    const auto of = "gives_" + std::to_string(samples);
    std::pair<double, Json> undisturbed, again;
    EXPECT_EQ(program({"--name", of}, [&](Launch& launch) { undisturbed = learn(launch, samples, -1, false); }), 0);
    EXPECT_EQ(undisturbed.second.at(2).at("batch_count"), samples / ranks - 1);
    for (const std::int64_t fails_at : {-1, 2, 3, 4, 5, 9}) {
      const auto name = of + "_fails_at_" + std::to_string(fails_at);
      EXPECT_NE(program({"--name", name}, [&](Launch& launch) { learn(launch, samples, fails_at, fails_at < 0); }), 0);
      EXPECT_EQ(program({"--name", name}, [&](Launch& launch) { again = learn(launch, samples, -1, false); }), 0);
      EXPECT_EQ(again, undisturbed) << name;
    }
  }
}

// --- Refused calls ---

struct Jitter : Preprocessor {
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch, at::Generator& generator) const override {
    batch.set("x", batch["x"] + at::rand(batch["x"].sizes(), generator));
  }
  Json state() const override { return 1; }
  void load_state(const Json&) override {}
};

struct Jittered : Noisy {
  void setup(const Config& config) override {
    Noisy::setup(config);
    register_data({line(), {.batch_size = 4}}, OperatorLoader(line().transform(std::make_shared<Jitter>())));
  }
  Metrics validate_batch(Batch& batch, const BatchInfo&) override {
    return {{"x", batch["x"].sum().item<double>()}, {"num_samples", batch.size()}};
  }
};

TEST(Operators, ValidateWithTheSameRandomNumbersAfterACutOffCall) {
  const auto learn = [](Launch& launch, std::int64_t fails_at) {
    OperatorTrainer<Jittered> trainer(launch, all_ranks(launch));
    std::vector<Json> seen;
    for (int round = 0; round < 3; ++round) {
      trainer.apply_all_operators([&](Jittered& its) { return its.fails_at = fails_at, Json(); });
      trainer.train({.num_steps = 2});
      for (int time = 0; time < 2; ++time) seen.push_back(trainer.validate().at("x"));
    }
    return seen;
  };
  std::vector<Json> undisturbed, again;
  EXPECT_EQ(program({"--name", "validates"}, [&](Launch& launch) { undisturbed = learn(launch, -1); }), 0);
  for (const auto& [i, j] : {std::pair(0, 1), {0, 2}, {1, 3}}) EXPECT_NE(undisturbed.at(i), undisturbed.at(j));
  for (const std::int64_t fails_at : {2, 3, 5}) {
    const auto name = "validates_" + std::to_string(fails_at);
    EXPECT_NE(program({"--name", name}, [&](Launch& launch) { learn(launch, fails_at); }), 0);
    EXPECT_EQ(program({"--name", name}, [&](Launch& launch) { again = learn(launch, -1); }), 0);
    EXPECT_EQ(again, undisturbed) << "failed at step " << fails_at;
  }
}

TEST(Operators, ACallThatIsRefusedChangesNothing) {
  const auto folder = storage() / "refused_states";
  const auto learn = [&](Launch& launch, bool refused, std::int64_t fails_at) {
    OperatorTrainer<Noisy> trainer(launch, all_ranks(launch));
    trainer.apply_all_operators([&](Noisy& its) { return its.fails_at = fails_at, Json(); });
    const auto try_them = [&] {
      if (!refused) return;
      const auto state = trainer.state_dict();
      expect_error("there is no", [&] { trainer.load(folder / "none"); });
      expect_error("num_steps is 0", [&] { trainer.train({.num_steps = 0}); });
      expect_error("max_retries is -1", [&] { trainer.train({.max_retries = -1}); });
      expect_error("num_steps is -1", [&] { trainer.validate({.num_steps = world().rank() == 0 ? -1 : 1}); });
      expect_error("no registered scheduler", [&] { trainer.update_scheduler(1); });
      auto other = state;
      other.tensors["model/weight"] = at::zeros({3, 3});
      expect_error("it does not fit", [&] { trainer.load_state_dict(other); });
      expect_error("it exists and is not a checkpoint", [&] { trainer.save(storage()); });
    };
    try_them();
    trainer.train();
    try_them();
    trainer.train({.num_steps = 2});
    return weight_of(trainer);
  };
  double plain = 0, refused = 0;
  on_all([&](Launch& launch) { plain = learn(launch, false, -1); });
  EXPECT_EQ(program({"--name", "refused"}, [&](Launch& launch) { refused = learn(launch, true, -1); }), 0);
  EXPECT_EQ(plain, refused);
  // In a resumed run they are refused again, from the saved record.
  EXPECT_NE(program({"--name", "refused_again"}, [&](Launch& launch) { learn(launch, true, 3); }), 0);
  EXPECT_EQ(program({"--name", "refused_again"}, [&](Launch& launch) { refused = learn(launch, true, -1); }), 0);
  EXPECT_EQ(plain, refused);
}

TEST(Operators, AMetricWithoutAValueIsAnErrorThatNamesIt) {
  struct Vectors : Noisy {
    Metrics train_batch(Batch& batch, const BatchInfo& info) override {
      auto metrics = Noisy::train_batch(batch, info);
      metrics.emplace("errors", at::ones({3}));
      return metrics;
    }
  };
  EXPECT_EQ(program({},
                    [](Launch& launch) {
                      OperatorTrainer<Vectors> trainer(launch, all_ranks(launch));
                      expect_error("the metric \"errors\"", [&] { trainer.train(); });
                    }),
            0);
}

TEST(Operators, AMetricWithANameOfEachReportIsRefused) {
  struct Named : Noisy {
    Metrics train_batch(Batch& batch, const BatchInfo& info) override {
      auto metrics = Noisy::train_batch(batch, info);
      metrics.emplace("world_size", 0.5);
      return metrics;
    }
    Metrics validate(OperatorBatches& batches, const EpochInfo& info) override {
      auto metrics = Noisy::validate(batches, info);
      metrics.emplace("late_ranks", Json::object());
      return metrics;
    }
  };
  on_all([](Launch& launch) {
    OperatorTrainer<Named> trained(launch, all_ranks(launch)), validated(launch, all_ranks(launch));
    expect_error("\"world_size\" is a field that every report already has", [&] { trained.train(); });
    expect_error("\"late_ranks\" is a field that every report already has", [&] { validated.validate(); });
  });
}

// --- Ended by a callback ---

struct EndAfter : Callback {
  explicit EndAfter(int reports) : most(reports) {}
  int most, reports = 0;
  void on_start(Session&) override { reports = 0; }
  void on_report(const Json&) override { ++reports; }
  bool should_stop() const override { return reports >= most; }
  Json state() const override { return reports; }
  void load_state(const Json& state) override { state.get_to(reports); }
};

struct Followed : Noisy {
  explicit Followed(int reports) : reports_(reports) {}
  void setup(const Config& config) override {
    Noisy::setup(config);
    session().add_callback(std::make_shared<EndAfter>(reports_));
    session().add_callback(nullptr);  // as the options of a run may have one
  }
  int reports_;
};

TEST(Operators, ACallbackEndsTrainingAsDone) {
  for (const bool all : {true, false}) {
    const std::string name = all ? "ended" : "ended_on_one";
    std::vector<Json> first;
    for (const bool again : {false, true}) {
      std::vector<Json> results;
      bool after = false;
      std::size_t trained = 0;
      testing::internal::CaptureStderr();
      const int code = program({"--name", name}, [&](Launch& launch) {
        OperatorTrainerOptions options{.num_workers = all ? launch.size() : 1};
        OperatorTrainer<Followed> trainer(
            launch, [] { return std::make_unique<Followed>(2); }, options);
        struct Keep {
          OperatorTrainer<Followed>& trainer;
          std::size_t& trained;
          bool here;
          ~Keep() {
            if (here) trained = trainer.get_local_operator().seen.size();
          }
        } keep{trainer, trained, all || launch.rank() == 0};
        for (int i = 0; i < 5; ++i) results.push_back(trainer.train());
        after = true;
      });
      EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << name;
      EXPECT_EQ(code, 0);
      EXPECT_FALSE(after) << "the next train() leads out of main";
      EXPECT_EQ(results.size(), 2u) << "the call that it was asked after has its results";
      if (again) {
        EXPECT_EQ(results, first);
        EXPECT_EQ(trained, 0u);
      }
      first = results;
      world().barrier();
      EXPECT_TRUE(params_of(name).value("finished", false));
      EXPECT_FALSE(fs::exists(storage() / name / "error.txt"));
      world().barrier();
    }
  }
  const int code = program({"--name", "ended"}, [&](Launch& launch) {  // with more patience it goes on
    OperatorTrainer<Followed> trainer(
        launch, [] { return std::make_unique<Followed>(4); }, all_ranks(launch));
    for (int i = 0; i < 3; ++i) trainer.train();
    EXPECT_FALSE(trainer.get_local_operator().seen.empty());
  });
  EXPECT_EQ(code, 0);
}

TEST(Operators, WhereACallbackHasEndedTrainingTheRestGoesOn) {
  const auto folder = test::shared_folder() / "ended";
  bool whole = false;
  on_all([&](Launch& launch) {
    OperatorTrainer<Followed> trainer(
        launch, [] { return std::make_unique<Followed>(1); }, all_ranks(launch));
    int ended = 0;
    trainer.train();
    for (int i = 0; i < 2; ++i) try {
        trainer.train();
      } catch (const Error& error) {
        ended += error.code() == ExitCode::done;
      }
    EXPECT_EQ(ended, 2);
    EXPECT_EQ(trainer.validate().at("num_samples"), 46);
    trainer.save(folder);
    trainer.shutdown();
    whole = fs::exists(folder);
  });
  EXPECT_TRUE(whole);
}

TEST(Operators, ASweepEndsTheTrialsOfOperators) {
  if (world().size() > 2) return;
  on_all([](Launch& launch) {
    const auto swept = Sweep(launch,
                             [](Launch& part, const Config& config) -> Result {
                               OperatorTrainer<Noisy> trainer(part, all_ranks(part, config));
                               for (int i = 0; i < 9; ++i) trainer.train();
                               ADD_FAILURE() << "max_t is 3";
                               return {};
                             },
                             {.space = {{"lr", grid({0.05, 0.01, 0.001})}},
                              .metric = "train_loss",
                              .mode = ScoreOrder::min,
                              .scheduler = asha({.grace_period = 1, .reduction_factor = 3, .max_t = 3}),
                              .name = "swept",
                              .storage_path = storage()})
                           .fit();
    EXPECT_FALSE(swept.error) << swept.error->what();
    for (const auto& trial : swept.trials) {
      EXPECT_TRUE(trial.status == TrialStatus::done || trial.status == TrialStatus::stopped) << trial.name;
      EXPECT_TRUE(trial.metrics.contains("train_loss")) << trial.metrics;
    }
    EXPECT_TRUE(swept.best());
  });
}

// --- Resumed ---

struct Calls {
  int code = 0;
  std::vector<Json> results = {};
  std::vector<double> seen = {};
  double weight = 0;
  std::vector<Json> rows = {};  ///< [epoch, training_iteration] of the history
};

struct Wanted {
  std::int64_t fails_at = -1;
  std::vector<std::string> flags = {};
  int calls = 4;
  std::optional<std::int64_t> num_steps = 6;
  bool split = true;
  int samples = 12;  ///< of a step
  bool draws = false;
  bool shuts_down = true;  ///< otherwise the trainer's destructor does
  Config config = Config::object();
};

Calls run_calls(const std::string& name, const Wanted& wanted) {
  Calls calls;
  auto flags = wanted.flags;
  flags.insert(flags.end(), {"--name", name});
  calls.code = program(flags, [&](Launch& launch) {
    auto config = wanted.config;
    config["batch_size"] = even(launch, wanted.samples);
    auto options = all_ranks(launch, config);
    options.add_dist_sampler = wanted.split;
    OperatorTrainer<Noisy> trainer(launch, options);
    auto& its = trainer.get_local_operator();
    its.fails_at = wanted.fails_at;
    struct Keep {
      Noisy& its;
      Calls& calls;
      ~Keep() { calls.seen = its.seen; }
    } keep{its, calls};
    for (int i = 0; i < wanted.calls; ++i) {
      if (wanted.draws) at::rand({3});
      calls.results.push_back(trainer.train({.num_steps = wanted.num_steps}));
      static_cast<void>(calls.results.back().at("train_loss"));
      if (wanted.draws) at::rand({2});
      calls.results.push_back(trainer.validate());
    }
    calls.weight = weight_of(trainer);
    if (wanted.shuts_down) trainer.shutdown();
  });
  for (const auto& row : Result::from_path(storage() / name).metrics_history)
    calls.rows.push_back({row.at("epoch"), row.at("training_iteration")});
  world().barrier();
  return calls;
}

TEST(Operators, AStopAfterTheLastBatchOfAPassLeavesNoCallWithoutBatches) {
  const auto straight = run_calls("one_batch", {.num_steps = {}, .samples = 46});
  EXPECT_EQ(straight.code, 0);
  const auto stopped = run_calls("one_batch_stopped", {.flags = {"--time-limit", "0"}, .num_steps = {}, .samples = 46});
  EXPECT_EQ(stopped.code, 85);
  const auto again = run_calls("one_batch_stopped", {.num_steps = {}, .samples = 46});
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(again.results, straight.results);
  EXPECT_EQ(again.weight, straight.weight);
}

TEST(Operators, ACallOfManyPassesIsStoppedBetweenThem) {
  const auto straight = run_calls("passes", {.calls = 1, .samples = 46});
  const auto stopped = run_calls("passes_stopped", {.flags = {"--time-limit", "0"}, .calls = 1, .samples = 46});
  EXPECT_EQ(stopped.code, 85);
  EXPECT_EQ(stopped.seen.size(), 1u);
  EXPECT_EQ(run_calls("passes_stopped", {.calls = 1, .samples = 46}).weight, straight.weight);
}

TEST(Operators, WorkersThatEachTakeAllGoOnWhereTheyStood) {
  const auto straight = run_calls("each_all", {.split = false});
  EXPECT_EQ(straight.code, 0);
  EXPECT_EQ(run_calls("each_all_cut", {.fails_at = 8, .split = false}).code, 1);
  const auto again = run_calls("each_all_cut", {.split = false});
  EXPECT_EQ(again.code, 0);
  ASSERT_LT(again.seen.size(), straight.seen.size());
  EXPECT_EQ(again.seen, std::vector<double>(straight.seen.end() - static_cast<std::ptrdiff_t>(again.seen.size()),
                                            straight.seen.end()));
  EXPECT_EQ(again.results, straight.results);
}

TEST(Operators, WhatMainDrawsBetweenCallsLeavesTheRandomStateOfTheRun) {
  const auto straight = run_calls("drawing", {.num_steps = {}, .draws = true});
  EXPECT_EQ(straight.code, 0);
  EXPECT_EQ(run_calls("drawing_cut", {.fails_at = 9, .num_steps = {}, .draws = true}).code, 1);
  const auto again = run_calls("drawing_cut", {.num_steps = {}, .draws = true});
  EXPECT_EQ(again.results, straight.results);
  EXPECT_EQ(again.weight, straight.weight);
  EXPECT_EQ(again.rows, straight.rows) << "and the history is that of an undisturbed run";

  EXPECT_EQ(run_calls("drawing_stopped", {.flags = {"--time-limit", "0"}, .num_steps = {}, .draws = true}).code, 85);
  EXPECT_EQ(run_calls("drawing_stopped", {.num_steps = {}, .draws = true}).weight, straight.weight);
}

TEST(Operators, AStateOfBeforeACallThatWasCutOffIsGone) {
  const auto main = [](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--name", "gone"});
    return program(flags, [](Launch& launch) {
      OperatorTrainer<Noisy> trainer(launch, all_ranks(launch, {{"batch_size", 1}}));
      const auto first = trainer.state_dict();
      trainer.train();
      trainer.load_state_dict(first);
    });
  };
  EXPECT_EQ(main({"--time-limit", "0"}), 85) << "in the middle of train()";
  EXPECT_EQ(main({}), 64) << "what state_dict() gives is later than it was";
}

TEST(Operators, TheStateOfTheBeginningBringsItsOrderBack) {
  on_all([](Launch& launch) {
    OperatorTrainer<Noisy> trainer(launch, all_ranks(launch));
    auto& seen = trainer.get_local_operator().seen;
    const auto first = trainer.state_dict();
    trainer.train();
    const auto order = std::exchange(seen, {});
    trainer.load_state_dict(first);
    trainer.train();
    EXPECT_EQ(seen, order);
  });
}

TEST(Operators, AFinishedRunGivesItsResultsAndMayBecomeLonger) {
  EXPECT_EQ(run_calls("done", {.fails_at = 7}).code, 1);
  EXPECT_TRUE(fs::exists(storage() / "done" / "error.txt"));
  EXPECT_FALSE(params_of("done").value("finished", false));
  world().barrier();
  const auto whole = run_calls("done", {});
  EXPECT_EQ(whole.code, 0);
  EXPECT_TRUE(params_of("done").value("finished", false));
  EXPECT_FALSE(fs::exists(storage() / "done" / "error.txt")) << "the cause of an end that was gone on from";
  world().barrier();

  const auto again = run_calls("done", {});
  EXPECT_EQ(again.results, whole.results);
  EXPECT_EQ(again.rows, whole.rows);
  EXPECT_TRUE(again.seen.empty());
  EXPECT_TRUE(params_of("done").value("finished", false));
  world().barrier();

  EXPECT_EQ(run_calls("done", {.fails_at = 30, .calls = 6}).code, 1);
  EXPECT_FALSE(params_of("done").value("finished", false)) << "it has trained on";
  world().barrier();
  const auto longer = run_calls("done", {.calls = 6});
  EXPECT_EQ(longer.code, 0);
  EXPECT_EQ(longer.results.size(), 12u);
  EXPECT_TRUE(params_of("done").value("finished", false));
  world().barrier();

  testing::internal::CaptureStderr();
  const auto other = run_calls("done", {.calls = 6, .config = {{"lr", 0.5}}});
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(other.results, longer.results);
  EXPECT_EQ(said.find("another configuration") != std::string::npos, world().rank() == 0) << said;
}

TEST(Operators, AFinishedRunDoesNotBecomeShorter) {
  const auto whole = run_calls("shorter", {});
  for (const bool shuts_down : {true, false}) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(run_calls("shorter", {.calls = 2, .shuts_down = shuts_down}).code, 64);
    const auto said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("main has made 4 of the 7 calls of the trainer that were made before the run was resumed") !=
                  said.npos,
              world().rank() == 0)
        << said;
    EXPECT_TRUE(params_of("shorter").value("finished", false));
    EXPECT_TRUE(fs::exists(storage() / "shorter" / "error.txt"));
    world().barrier();
  }
  EXPECT_EQ(run_calls("shorter", {}).results, whole.results);
}

TEST(Operators, ARefusedStartLeavesTheParamsOfTheRun) {
  EXPECT_EQ(run_calls("refused_start", {.fails_at = 7}).code, 1);
  const auto before = params_of("refused_start");
  world().barrier();
  const auto code = program({"--name", "refused_start"}, [](Launch& launch) {
    OperatorTrainer<Noisy> trainer(launch, all_ranks(launch, {{BATCH_SIZE, 0}}));
  });
  EXPECT_EQ(code, 64);
  world().barrier();
  EXPECT_EQ(params_of("refused_start"), before);
}

TEST(Operators, DoNotGoOnFromACheckpointWithoutTheirCalls) {
  EXPECT_EQ(program({"--name", "without_calls"},
                    [](Launch& launch) {
                      const auto train = [](Session& session, const Config&) {
                        const auto entry = [](const Json& values) {
                          return StateEntry([values] { return StateDict{.values = values}; }, [](const StateDict&) {});
                        };
                        auto state = session.state({{"operator", entry({})},
                                                    {"progress", entry({{"epochs", 1}, {"global_step", 4}})},
                                                    {"calls", entry({{"open", false}, {"taken", 0}})}});
                        session.report({{"loss", 1}}, state);
                        throw std::runtime_error("it goes on as an operator");
                      };
                      const auto result = TorchTrainer(launch, train, {}).fit();
                      EXPECT_TRUE(result.error);
                    }),
            0);
  world().barrier();
  EXPECT_EQ(program({"--name", "without_calls"},
                    [](Launch& launch) {
                      expect_error(
                          "restoring the calls of an operator's trainer: the checkpoint has none. Choose "
                          "another --name to begin anew",
                          [&] { OperatorTrainer<Curriculum> trainer(launch, all_ranks(launch)); });
                    }),
            0);
}

// --- Several trainers ---

struct Folds {
  int code = 0;
  std::vector<double> losses = {};
  std::vector<std::size_t> trained = {};  ///< batches of each fold, here
};

/// Two trainers with learning rates of their own, one after the other or at the same time.
Folds run_folds(const std::vector<std::string>& flags, std::int64_t second_fails_at = -1, bool together = false) {
  Folds folds;
  folds.code = program(flags, [&](Launch& launch) {
    std::vector<std::unique_ptr<OperatorTrainer<Noisy>>> trainers;
    for (const double lr : {0.001, 0.1}) {
      trainers.push_back(std::make_unique<OperatorTrainer<Noisy>>(
          launch, all_ranks(launch, {{"lr", lr}, {"batch_size", even(launch, 12)}})));
      auto& trainer = *trainers.back();
      auto& its = trainer.get_local_operator();
      if (trainers.size() == 2) its.fails_at = second_fails_at;
      for (int i = 0; i < 3; ++i) folds.losses.push_back(trainer.train().at("train_loss"));
      folds.losses.push_back(trainer.validate().at("val_loss"));
      folds.trained.push_back(its.seen.size());
      if (!together) trainers.back()->shutdown();
    }
  });
  world().barrier();
  return folds;
}

TEST(Operators, EachTrainerOfAProgramHasARunOfItsOwn) {
  const auto unnamed = run_folds({});
  EXPECT_NE(unnamed.losses.front(), unnamed.losses.back());
  for (const bool together : {false, true}) {
    const std::string name = together ? "folds_together" : "folds";
    const auto first = run_folds({"--name", name}, -1, together);
    EXPECT_EQ(first.code, 0);
    EXPECT_EQ(first.losses, unnamed.losses);
    for (const auto* each : {"", "_2"}) EXPECT_TRUE(fs::exists(storage() / (name + each) / "params.json")) << each;
    const auto again = run_folds({"--name", name}, -1, together);
    EXPECT_EQ(again.losses, unnamed.losses);
    EXPECT_EQ(again.trained, (std::vector<std::size_t>{0, 0}));
  }
  EXPECT_EQ(run_folds({"--name", "folds_cut"}, 5).code, 1);
  const auto again = run_folds({"--name", "folds_cut"});
  EXPECT_EQ(again.losses, unnamed.losses);
  EXPECT_EQ(again.trained.at(0), 0u);
  EXPECT_GT(again.trained.at(1), 0u);
}

TEST(Operators, WithoutANameNoFolderStaysUnlessSomethingIsSavedThere) {
  const auto main = [](std::vector<std::string> flags, std::int64_t fails_at) {
    const auto folder = test::shared_folder();
    const auto before = fs::current_path();
    fs::current_path(folder);
    std::vector<std::string> words{"job", "--log-level", "off"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    {
      Launch launch(static_cast<int>(argv.size()), argv.data());
      launch.run([&] {
        for (int i = 0; i < 2; ++i) {
          OperatorTrainer<Noisy> trainer(launch, all_ranks(launch));
          trainer.get_local_operator().fails_at = fails_at;
          trainer.train();
          trainer.validate();
          trainer.save("mine");
          trainer.shutdown();
        }
      });
    }
    world().barrier();
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(folder)) left.push_back(entry.path().filename());
    std::sort(left.begin(), left.end());
    fs::current_path(before);
    world().barrier();
    return left;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(main({}, -1), Names{"mine"});
  EXPECT_EQ(main({"--name", "named"}, -1), (Names{"mine", "runs"}));
  EXPECT_EQ(main({"--storage", "there"}, -1), (Names{"mine", "there"}));
  EXPECT_EQ(main({"--time-limit", "0"}, -1), Names{"runs"}) << "which has the state to go on from";
  EXPECT_EQ(main({}, 1), Names{"runs"}) << "which has the error and the logs";
}

// --- Ranks that disagree ---

struct Counted : Noisy {
  Metrics validate(OperatorBatches& batches, const EpochInfo&) override {
    F1 f1({.num_classes = 2});
    std::int64_t samples = 0;
    for (auto& batch : batches) {
      f1.add((batch["x"] > 0.3).flatten().to(at::kLong), (batch["y"] > 0.8).flatten().to(at::kLong), batch.size());
      samples += batch.size();
    }
    return {{"f1", f1}, {"num_samples", samples}};
  }
};

TEST(Operators, AMetricOfSamplesIsMadeOfAllWorkers) {
  on_all([](Launch& launch) {
    F1 expected({.num_classes = 2});
    const auto x = at::arange(46, at::kFloat) / 46;
    expected.add((x > 0.3).to(at::kLong), (3 * x - 1 > 0.8).to(at::kLong));
    OperatorTrainer<Counted> trainer(launch, all_ranks(launch));
    EXPECT_NEAR(trainer.validate().at("f1").get<double>(), expected.value(), 1e-9);
  });
}

struct Normed : TrainingOperator {
  torch::nn::BatchNorm1d net{nullptr};
  void setup(const Config&) override {
    net = torch::nn::BatchNorm1d(1);
    register_training(Components{.models = net, .optimizers = torch::optim::SGD(net->parameters(), 0.1)});
  }
};

TEST(Operators, TheStateIsTheSameOnAllRanks) {
  on_all([](Launch& launch) {
    OperatorTrainer<Normed> trainer(launch, all_ranks(launch));
    trainer.apply_all_operators([](Normed& its) {
      its.net->forward(at::arange(4, at::kFloat).unsqueeze(1) + its.world_rank());
      return Json();
    });
    const auto mean = std::to_string(trainer.state_dict().tensors.at("model/running_mean").item<double>());
    for (const auto& theirs : world().all_gather(mean)) EXPECT_EQ(theirs, mean);
  });
}

// --- Registering and the first calls ---

struct Streamed : Noisy {
  void setup(const Config& config) override {
    Noisy::setup(config);
    register_data({Dataset::from_stream([](const StreamShard& shard) {
                     return [row = shard.worker, workers = shard.workers]() mutable -> std::optional<Json> {
                       const double x = std::exchange(row, row + workers) / 24.0;
                       if (x >= 1) return {};
                       return Json{{"x", {x}}, {"y", {3 * x - 1}}};
                     };
                   }),
                   {.batch_size = 4, .dtypes = {{"x", at::kFloat}, {"y", at::kFloat}}},
                   {.features = {"x"}, .target = "y"}});
  }
};

TEST(Operators, AKeptRunTakesWholePassesOfAStream) {
  const int code = program({"--name", "streamed"}, [](Launch& launch) {
    OperatorTrainer<Streamed> trainer(launch, all_ranks(launch));
    for (int i = 0; i < 2; ++i) EXPECT_EQ(trainer.train().at("num_samples"), 24);
    expect_error("the stream \"train\"", [&] { trainer.train({.num_steps = 1}); });
  });
  EXPECT_EQ(code, 0);
  on_all([](Launch& launch) {
    OperatorTrainer<Streamed> trainer(launch, all_ranks(launch));
    EXPECT_EQ(trainer.train({.num_steps = 1}).at("batch_count"), 1);
  });
}

struct Twofold : Noisy {
  std::vector<int> loops = {};
  Metrics train_epoch(OperatorBatches& batches, const EpochInfo&) override {
    for (int loop = 0; loop < 2; ++loop) {
      loops.push_back(0);
      for ([[maybe_unused]] auto& batch : batches) ++loops.back();
    }
    return {};
  }
};

TEST(Operators, ACallHasItsBatchesOnce) {
  on_all([](Launch& launch) {
    OperatorTrainer<Twofold> trainer(launch, all_ranks(launch, {{"batch_size", even(launch, 12)}}));
    EXPECT_EQ(trainer.train().at("epoch"), 1);
    EXPECT_EQ(trainer.train({.num_steps = 3}).at("epoch"), 2);
    EXPECT_EQ(trainer.get_local_operator().loops, (std::vector{4, 0, 3, 0}));
  });
}

struct TwicePlain : Noisy {
  std::vector<double> sums = {};
  Metrics validate(OperatorBatches& batches, const EpochInfo&) override {
    for (int loop = 0; loop < 3; ++loop) {
      sums.push_back(0);
      for (auto& batch : batches) {
        sums.back() += static_cast<double>(batch.size());
        if (loop == 1) break;
      }
    }
    return {};
  }
};

TEST(Operators, AValidationMayGoOverItsBatchesAgain) {
  on_all([](Launch& launch) {
    OperatorTrainer<TwicePlain> trainer(launch, all_ranks(launch));
    for (int call = 0; call < 2; ++call) {
      const auto& sums = trainer.get_local_operator().sums;
      trainer.get_local_operator().sums.clear();
      trainer.validate({.num_steps = call == 0 ? std::nullopt : std::optional<std::int64_t>(2)});
      ASSERT_EQ(sums.size(), 3u);
      EXPECT_EQ(sums[2], sums[0]);
      EXPECT_GT(sums[1], 0);
      const auto all = world().all_reduce(static_cast<std::int64_t>(sums[0]));
      EXPECT_EQ(all, call == 0 ? 46 : std::min(46, 2 * 8 * launch.size()));
    }
  });
}

struct EachAll : TrainingOperator {
  void setup(const Config& config) override {
    if (config.at("torch"))
      register_data({Pairs(), DataLoaderOptions{.global_batch_size = 7}});
    else
      register_data({line(), {.global_batch_size = 7}});
  }
  Metrics train_batch(Batch& batch, const BatchInfo&) override { return {{"num_samples", batch.size()}}; }
};

TEST(Operators, AGlobalBatchIsThatOfAllWorkersThoughEachTakesAllData) {
  for (const bool torch : {false, true})
    on_all([&](Launch& launch) {
      auto options = all_ranks(launch, {{"torch", torch}});
      options.add_dist_sampler = false;
      const auto results = OperatorTrainer<EachAll>(launch, options).train();
      const int each = even(launch, 7);
      EXPECT_EQ(results.at("batch_count"), (46 + each - 1) / each) << torch;
      EXPECT_EQ(results.at("num_samples"), 46 * launch.size()) << torch;
    });
}

struct OwnLoss : TrainingOperator {
  void setup(const Config&) override {
    register_data({line(), {.batch_size = 4}}, OperatorLoader(line(), {.batch_size = 5}));
  }
  Metrics train_batch(Batch& batch, const BatchInfo&) override { return {{"own", batch["x"].mean()}}; }
  Metrics validate_batch(Batch& batch, const BatchInfo&) override { return {{"own", batch["x"].mean()}}; }
};

TEST(Operators, ABatchCountsByItsSamplesIfItsResultsDoNotSayHowMany) {
  std::vector<std::int64_t> all(46);
  std::iota(all.begin(), all.end(), 0);
  const auto mean = line().read(all)["x"].mean().item<double>();
  on_all([&](Launch& launch) {
    OperatorTrainer<OwnLoss> trainer(launch, all_ranks(launch));
    for (const auto& results : {trainer.train(), trainer.validate()}) {
      EXPECT_EQ(results.at("num_samples"), 46);
      EXPECT_NEAR(results.at("own").get<double>(), mean, 1e-5 * std::abs(mean));
    }
  });
}

struct Idle : Noisy {
  bool works = false;
  Metrics train_epoch(OperatorBatches& batches, const EpochInfo& info) override {
    return works ? Noisy::train_epoch(batches, info) : Metrics();
  }
};

TEST(Operators, ABatchThatNobodyHasAskedForIsNotLost) {
  on_all([](Launch& launch) {
    OperatorTrainer<Idle> trainer(launch, all_ranks(launch));
    trainer.train({.num_steps = 1});
    trainer.train();
    trainer.get_local_operator().works = true;
    EXPECT_EQ(trainer.train().at("num_samples"), 46);
  });
}

struct Twice : TrainingOperator {
  void setup(const Config&) override {
    const OperatorLoader loader(
        prepare_data_loader(session(), Pairs().map(torch::data::transforms::Stack<>()), {.batch_size = 4}));
    register_data(loader, loader);
  }
};

TEST(Operators, APreparedLoaderServesOnce) {
  on_all([](Launch& launch) {
    expect_error("a loader each", [&] { OperatorTrainer<Twice>(launch, all_ranks(launch)).validate(); });
  });
}

struct Prepared : TrainingOperator {
  void setup(const Config& config) override {
    const auto data = Pairs().map(torch::data::transforms::Stack<>());
    if (config.value("own", false))
      register_data(OperatorLoader(prepare_data_loader(
          session(), data, {.batch_size = 4},
          torch::data::samplers::DistributedRandomSampler(46, static_cast<std::size_t>(session().world_size()),
                                                          static_cast<std::size_t>(world_rank())))));
    else
      register_data(OperatorLoader(prepare_data_loader(session(), data, {.batch_size = 4})));
  }
  Metrics train_batch(Batch& batch, const BatchInfo&) override { return {{"num_samples", batch.size()}}; }
};

TEST(Operators, APreparedLoaderIsNotWholeOnEachWorker) {
  on_all([](Launch& launch) {
    auto options = all_ranks(launch);
    options.add_dist_sampler = false;
    expect_error("add_dist_sampler", [&] { OperatorTrainer<Prepared>(launch, options).train(); });
    options.config["own"] = true;
    EXPECT_GE(OperatorTrainer<Prepared>(launch, options).train().at("num_samples"), 46) << "which divides by itself";
  });
}

}  // namespace
}  // namespace muster::operator_again_test
