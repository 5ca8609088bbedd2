// The trace of some steps: what is in it, and when it is written.
#include "support/job.hpp"

#include "base/file.hpp"
#include "muster/json.hpp"

#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::profile_test {
namespace {

namespace fs = std::filesystem;
using test::world;

/// Trains `epochs` epochs of 8 steps, with a report after each; `at_step` is called in each step, before backward().
std::function<void(Session&, const Config&)> training(std::int64_t epochs,
                                                      std::function<void(Session&, std::int64_t)> at_step = {}) {
  return [=](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.fuse = Fuse::always});
    std::int64_t step = 0;
    auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"step", step}});
    state.restore();
    for ([[maybe_unused]] const auto epoch : session.epochs(epochs)) {
      for (auto& batch : session.get_dataset_shard("train").iter_batches({.global_batch_size = 6})) {
        ++step;
        optimizer.zero_grad();
        const auto loss = torch::mse_loss(net->forward(batch["x"]), batch["y"]);
        if (at_step) at_step(session, step);
        loss.backward();
        optimizer.step();
      }
      session.report({{"step", step}}, state);
    }
  };
}

test::Job job(const fs::path& storage, std::vector<std::string> flags) {
  test::Job job{storage, std::move(flags), {}};
  job.options.run_config.name = "run";
  job.options.datasets = {{"train", test::line()}};
  return job;
}

std::set<std::string> traces(const fs::path& run) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(run))
    if (const auto name = entry.path().filename().string(); name.starts_with("trace_")) names.insert(name);
  return names;
}

/// The events of a trace, by rank and name.
using Events = std::map<std::pair<int, std::string>, std::vector<Json>>;

Events read(const fs::path& path) {
  Events events;
  const auto file = Json::parse(detail::read_file(path));
  for (const auto& event : file["traceEvents"])
    if (event["ph"] != "M" && event["ph"] != "e") events[{event["pid"], event["name"]}].push_back(event);
  return events;
}

std::vector<std::int64_t> numbers(const std::vector<Json>& events) {
  std::vector<std::int64_t> all;
  for (const auto& event : events) all.push_back(event["args"]["number"]);
  return all;
}

double end_of(const Json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); }
bool contains(const Json& outer, const Json& inner) {
  return outer["ts"] <= inner["ts"] && end_of(inner) <= end_of(outer);
}

TEST(Profile, OperatorsAloneAskForOne) {
  const auto storage = test::shared_folder();
  ASSERT_EQ(run(job(storage, {"--profile-operators"}), training(4)).first, 0);
  ASSERT_EQ(traces(storage / "run"), std::set<std::string>{"trace_11_20.json"});
}

TEST(Profile, HasThePhasesOfEachStepOnEachRank) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run(job(storage, {"--profile=3:6", "--profile-operators"}), training(2));
  ASSERT_EQ(code, 0);
  ASSERT_EQ(traces(storage / "run"), std::set<std::string>{"trace_3_6.json"});
  auto events = read(storage / "run" / "trace_3_6.json");
  for (int rank = 0; rank < world().size(); ++rank) {
    const auto& steps = events[{rank, "step"}];
    EXPECT_EQ(numbers(steps), (std::vector<std::int64_t>{3, 4, 5, 6})) << rank;
    for (const char* phase : {"forward", "backward", "optimizer", "wait for data"}) {
      const auto& phases = events[{rank, phase}];
      ASSERT_EQ(phases.size(), 4U) << rank << " " << phase;
      for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(contains(steps[i], phases[i])) << rank << " " << phase;
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const auto &forward = events[{rank, "forward"}][i], &backward = events[{rank, "backward"}][i],
                 &optimizer = events[{rank, "optimizer"}][i];
      EXPECT_LE(end_of(forward), backward["ts"].get<double>() + 1e-3);
      EXPECT_LE(end_of(backward), optimizer["ts"]);
    }
    EXPECT_EQ((events[{rank, "aten::addmm"}].size()), 4U);
    EXPECT_EQ((events[{rank, "AddmmBackward0"}].size()), 4U);
  }
  // Each bucket is reduced by one of the ranks.
  if (world().size() > 1) {
    std::size_t reduced = 0;
    for (int rank = 0; rank < world().size(); ++rank) reduced += events[{rank, "reduce bucket and update"}].size();
    EXPECT_EQ(reduced, 4U);
  }
}

TEST(Profile, SpansOfAThreadLieInsideOrBesideEachOther) {
  const auto storage = test::shared_folder();
  const auto with_barrier = [](Session& session, std::int64_t) { session.barrier(); };
  ASSERT_EQ(run(job(storage, {"--profile=2:14", "--profile-operators"}), training(3, with_barrier)).first, 0);
  std::map<std::pair<int, int>, std::vector<Json>> threads;
  std::map<int, std::vector<std::pair<double, double>>> barriers;  ///< by rank: when it came and when it left
  const auto file = Json::parse(detail::read_file(storage / "run" / "trace_2_14.json"));
  std::map<int, double> begun;
  for (const auto& event : file["traceEvents"]) {
    if (event["ph"] == "X") threads[{event["pid"], event["tid"]}].push_back(event);
    if (event["name"] != "barrier") continue;
    if (event["ph"] == "b") begun[event["id"]] = event["ts"];
    if (event["ph"] == "e") barriers[event["pid"]].emplace_back(begun.at(event["id"]), event["ts"]);
  }
  for (auto& [thread, events] : threads) {
    std::ranges::sort(events, [](const Json& a, const Json& b) {
      return std::pair(a["ts"].get<double>(), -end_of(a)) < std::pair(b["ts"].get<double>(), -end_of(b));
    });
    std::vector<Json> open;
    for (const auto& event : events) {
      while (!open.empty() && end_of(open.back()) <= event["ts"]) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(end_of(event), end_of(open.back()) + 1e-3) << event << " overlaps " << open.back();
      }
      open.push_back(event);
    }
  }
  // Nobody leaves a barrier before the last rank has come.
  for (std::size_t i = 0; world().size() > 1 && i < barriers[0].size(); ++i) {
    double last_came = 0, first_left = 1e300;
    for (const auto& [rank, all] : barriers) {
      ASSERT_EQ(all.size(), barriers[0].size());
      last_came = std::max(last_came, all[i].first);
      first_left = std::min(first_left, all[i].second);
    }
    EXPECT_LE(last_came, first_left + 1e-3);
  }
}

TEST(Profile, NamesTheRankThatTheOthersWaitFor) {
  const auto storage = test::shared_folder();
  const int last = world().size() - 1;
  const auto sleeping = [=](Session& session, std::int64_t step) {
    if (session.world_rank() == last && step == 5) std::this_thread::sleep_for(std::chrono::milliseconds(30));
  };
  ASSERT_EQ(run(job(storage, {"--profile=5:5"}), training(1, sleeping)).first, 0);
  const auto file = Json::parse(detail::read_file(storage / "run" / "trace_5_5.json"));
  const auto& waited_for = file["otherData"]["waited_for"];
  if (world().size() == 1) {
    EXPECT_TRUE(waited_for.empty());
    return;
  }
  const auto entry = std::ranges::find(waited_for, last, [](const Json& one) { return one["rank"].get<int>(); });
  ASSERT_NE(entry, waited_for.end());
  EXPECT_GT((*entry)["ms"], 20.0) << "both others waited about 30 ms";
}

TEST(Profile, RecordsTheEleventhToTheTwentiethStepOfEachStart) {
  const auto storage = test::shared_folder();
  ASSERT_EQ(run(job(storage, {"--profile"}), training(3)).first, 0);
  EXPECT_EQ(traces(storage / "run"), std::set<std::string>{"trace_11_20.json"});
  // The run goes on after step 24.
  ASSERT_EQ(run(job(storage, {"--profile", "--resume", "must"}), training(6)).first, 0);
  EXPECT_EQ(traces(storage / "run"), (std::set<std::string>{"trace_11_20.json", "trace_35_44.json"}));
  EXPECT_EQ(numbers(read(storage / "run" / "trace_35_44.json")[{0, "step"}]),
            (std::vector<std::int64_t>{35, 36, 37, 38, 39, 40, 41, 42, 43, 44}));
}

TEST(Profile, OfStepsThatAreNotReachedHasNoTrace) {
  const auto storage = test::shared_folder();
  ASSERT_EQ(run(job(storage, {"--profile=100:200"}), training(1)).first, 0);
  EXPECT_TRUE(traces(storage / "run").empty());
}

TEST(Profile, ThatEndsWithTrainingHasTheStepsUntilThen) {
  const auto storage = test::shared_folder();
  auto asked = job(storage, {});
  asked.options.run_config.profile = {.enabled = true, .first_step = 7, .last_step = 100};
  ASSERT_EQ(run(asked, training(1)).first, 0);
  auto events = read(storage / "run" / "trace_7_100.json");
  EXPECT_EQ(numbers(events[{0, "step"}]), std::vector<std::int64_t>{7}) << "the end of the last step is not seen";
  EXPECT_EQ((events[{0, "report"}].size()), 1U);
  EXPECT_GE((events[{0, "save"}].size()), 1U);
}

TEST(Profile, ARankThatFailsWhileTheOthersWriteEndsAll) {
  const auto storage = test::shared_folder();
  const auto train = training(1);
  const int last = world().size() - 1;
  const auto failing = [&](Session& session, const Config& config) {
    train(session, config);
    if (session.world_rank() == last) throw std::runtime_error("it has failed at the end");
  };
  const auto [code, result] = run(job(storage, {"--profile=7:100"}), failing);  // the others write at the end
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result->error);
  EXPECT_NE(std::string(result->error->what()).find("it has failed at the end"), std::string::npos);
  EXPECT_TRUE(traces(storage / "run").empty());
  // The ranks go on, with communicators on which messages were left.
  auto again = job(storage, {"--profile=7:100"});
  again.options.run_config.name = "again";
  EXPECT_EQ(run(again, train).first, 0);
  EXPECT_EQ(traces(storage / "again"), std::set<std::string>{"trace_7_100.json"});
}

TEST(Profile, OfAnAttemptThatFailsDoesNotDisturbTheNext) {
  const auto storage = test::shared_folder();
  auto asked = job(storage, {"--profile=3:12"});
  asked.options.run_config.failure_config.max_failures = 1;
  bool failed = false;
  const auto failing = [&](Session&, std::int64_t step) {
    if (step == 5 && !std::exchange(failed, true)) throw std::runtime_error("once");
  };
  ASSERT_EQ(run(asked, training(2, failing)).first, 0);
  EXPECT_EQ(numbers(read(storage / "run" / "trace_3_12.json")[{0, "step"}]),
            (std::vector<std::int64_t>{3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
}

}  // namespace
}  // namespace muster::profile_test
