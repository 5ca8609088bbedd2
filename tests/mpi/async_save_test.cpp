// Asynchronous saves, and saves through a fast tier: they save the state at the
// report, their errors come at the next report, and no finished save is missing.
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/store.hpp"
#include "comm/make_world.hpp"
#include "comm/on_ranks.hpp"
#include "storage/folder_tier.hpp"
#include "support/forge.hpp"
#include "support/io_errors.hpp"
#include "support/job.hpp"
#include "support/saving_gate.hpp"

#include "muster/muster.hpp"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::async_save_test {
namespace {

namespace fs = std::filesystem;
using test::run;
using test::SavingGate;
using test::world;

TorchTrainerOptions with(std::string name, CheckpointConfig config, int max_failures = 0) {
  return {.run_config = {.name = std::move(name),
                         .checkpoint_config = std::move(config),
                         .failure_config = {.max_failures = max_failures}},
          .datasets = {{"train", test::line()}}};
}

std::string text_of(const std::optional<Result>& result) {
  return result && result->error ? result->error->what() : "no error";
}

void expect_same_everywhere(const std::string& value) {
  for (const auto& theirs : world().all_gather(value)) EXPECT_EQ(theirs, value);
}

std::vector<std::string> names_in(const std::optional<Result>& result) {
  std::vector<std::string> names;
  for (const auto& row : result->metrics_history) names.push_back(row.value("checkpoint_dir_name", ""));
  return names;
}

/// Rank 0 makes the folder and stops at the gate; the other ranks wait for it.
std::unique_ptr<SavingGate> gate_on_rank_0(const std::string& part = "", int error = 0) {
  return world().rank() == 0 ? std::make_unique<SavingGate>(part, error) : nullptr;
}

struct Way {
  Fuse fuse = Fuse::never;
  bool momentum = false;  // SGD in place of Adam
  bool edits = false;     // parameters are changed by hand between report and step
};

class Ways : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(AsyncSave, Ways,
                         testing::Values(Way{}, Way{.fuse = Fuse::always}, Way{.fuse = Fuse::always, .momentum = true},
                                         Way{.fuse = Fuse::always, .edits = true}));

struct Net : torch::nn::Module {
  torch::nn::Linear in = register_module("in", torch::nn::Linear(1, 200));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(200, 200));
  torch::nn::Linear unused = register_module("unused", torch::nn::Linear(200, 3));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(200, 1));
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(middle(at::tanh(in(x))))); }
};

template <class O>
void train(Session& session, const Way& way, O own, std::shared_ptr<Net> net, std::vector<double>& weights) {
  auto optimizer = session.prepare_optimizer(std::move(own), {.fuse = way.fuse});
  EXPECT_EQ(optimizer.fused(), way.fuse == Fuse::always && session.world_size() > 1);
  auto own_tensor = at::full({70'000}, 1.0, at::kDouble),
       of_rank = at::full({40'000}, session.world_rank(), at::kFloat);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"t", own_tensor}, {"r", per_rank(of_rank)}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for (auto epoch : session.epochs(2))
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = 8, .shuffle = true})) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer.step();
      session.report({{"epoch", epoch}}, state);
      own_tensor.add_(1);
      of_rank.mul_(1.5);
      const at::NoGradGuard no_grad;
      if (way.edits && session.global_step() % 2 == 0) net->middle->weight.mul_(0.5);
    }
  weights.clear();
  for (const auto& parameter : net->parameters())
    for (std::int64_t i = 0; i < parameter.numel(); i += 97) weights.push_back(parameter.flatten()[i].item<double>());
}

TEST_P(Ways, SaveWhatWasThereAtTheReport) {
  const auto way = GetParam();
  const auto storage = test::shared_folder(), fast = test::shared_folder();
  std::vector<std::vector<double>> weights;
  std::size_t saves = 0;
  const std::vector<CheckpointConfig> configs{
      {}, {.async_save = true}, {.fast_tier = fast}, {.async_save = true, .fast_tier = fast}};
  for (std::size_t i = 0; i < configs.size(); ++i) {
    const auto [code, result] =
        run({storage, {}, with(std::to_string(i), configs[i])}, [&](Session& session, const Config&) {
          auto net = session.prepare_model(std::make_shared<Net>());
          auto& mine = weights.emplace_back();
          if (way.momentum)
            train(session, way, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)), net,
                  mine);
          else
            train(session, way, torch::optim::Adam(net->parameters(), 0.01), net, mine);
        });
    EXPECT_EQ(code, 0) << text_of(result);
    ASSERT_EQ(weights.size(), i + 1);
    EXPECT_EQ(weights[i], weights[0]) << "saving has changed the training of " << i;
    const auto names = names_in(result);
    const auto there = list_checkpoints(storage / std::to_string(i));
    ASSERT_EQ(there.size(), names.size());
    if (i == 0) saves = there.size();
    ASSERT_EQ(there.size(), saves);
    ASSERT_GT(saves, 4u);
    for (std::size_t k = 0; k < there.size(); ++k) {
      EXPECT_EQ(there[k].path.filename(), names[k]);
      EXPECT_EQ(verify_checkpoint(there[k].path).problem, "");
      // One rank after the other, so that not all ranks read everything.
      if (static_cast<int>(k) % world().size() != world().rank()) continue;
      const auto here = Checkpoint::from_directory(there[k].path).to_dict();
      const auto expected = Checkpoint::from_directory(storage / "0" / names[k]).to_dict();
      EXPECT_EQ(here.values, expected.values);
      ASSERT_EQ(here.tensors.size(), expected.tensors.size());
      for (const auto& [name, tensor] : expected.tensors)
        EXPECT_TRUE(at::equal(here.tensors.at(name), tensor)) << name << " in " << names[k] << " of " << i;
    }
    EXPECT_EQ(result->checkpoint->path().filename(), names.back());
    world().barrier();
    EXPECT_TRUE(fs::is_empty(fast)) << "something is left in the fast tier";
    world().barrier();
  }
}

// Large enough for several writers in the tests below: 8 MB for each.

/// Reports a number, which is also the whole state.
void report(Session& session, std::int64_t& number) {
  auto state = session.state({{"number", number}});
  session.report({{"number", number}}, state);
}

TEST(AsyncSave, IsNotTouchedByWhatComesAfter) {
  const auto storage = test::shared_folder();
  const auto gate = gate_on_rank_0();
  auto values = at::full({3'200'000}, 1.0, at::kDouble);
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        auto state = session.state({{"values", values}});
        session.report({}, state);
        EXPECT_TRUE(list_checkpoints(storage / "run").empty());
        values.fill_(2.0);
        session.barrier();
        if (gate) gate->open();
      });
  EXPECT_EQ(code, 0) << text_of(result);
  const auto saved = result->checkpoint->to_dict().tensors.at("values");
  EXPECT_TRUE(at::equal(saved, at::full({3'200'000}, 1.0, at::kDouble)));
}

TEST(AsyncSave, SavesTensorsOfAnyKind) {
  const auto storage = test::shared_folder();
  const auto saved = [&](const std::string& name, bool behind) {
    std::map<std::string, at::Tensor> tensors{
        {"transposed", at::arange(1'200'000, at::kDouble).reshape({1000, 1200}).t()},
        {"strided", at::arange(2'000'000, at::kFloat).slice(0, 0, 2'000'000, 3)},
        {"half", at::arange(1000, at::kFloat).to(at::kHalf)},
        {"bool", at::arange(100'000).remainder(3).eq(1)},
        {"scalar", at::full({}, 5, at::kLong)},
        {"empty", at::full({0, 3}, 5, at::kLong)}};
    tensors.emplace("again", tensors.at("transposed"));
    tensors.emplace("part", tensors.at("transposed").select(1, 7));
    StateEntries entries;
    for (auto& [key, tensor] : tensors) entries.emplace_back(key, tensor);
    entries.emplace_back("own", per_rank(tensors.at("half")));
    const auto [code, result] =
        run({storage, {}, with(name, {.async_save = behind})}, [&](Session& session, const Config&) {
          auto state = session.state(entries);
          session.report({}, state);
          for (auto& [key, tensor] : tensors) tensor.zero_();
        });
    EXPECT_EQ(code, 0) << text_of(result);
    return result->checkpoint->to_dict();
  };
  const auto now = saved("now", false), behind = saved("behind", true);
  ASSERT_EQ(now.tensors.size(), 9u);
  ASSERT_EQ(behind.tensors.size(), now.tensors.size());
  for (const auto& [name, tensor] : now.tensors) EXPECT_TRUE(at::equal(behind.tensors.at(name), tensor)) << name;
}

TEST(AsyncSave, CopiesTheUsersFilesBeforeTheReportReturns) {
  const auto storage = test::shared_folder(), files = test::shared_folder();
  const auto own = files / ("rank" + std::to_string(world().rank()));
  fs::create_directory(own);
  const auto name = "notes" + std::to_string(world().rank());
  detail::write_file(own / name, "before");
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        session.report({}, Checkpoint::from_directory(own));
        detail::write_file(own / name, "after");
      });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(detail::read_file(result->checkpoint->path() / name), "before");
}

TEST(AsyncSave, ThatIsBusyDropsTheNextOrHasItWait) {
  const auto storage = test::shared_folder();
  for (const auto when_busy : {WhenBusy::drop, WhenBusy::wait}) {
    const std::string name = when_busy == WhenBusy::drop ? "drop" : "wait";
    const auto gate = gate_on_rank_0();
    std::thread opener;
    const auto [code, result] = run({storage, {}, with(name, {.async_save = true, .when_busy = when_busy})},
                                    [&](Session& session, const Config&) {
                                      std::int64_t number = 1;
                                      report(session, number);
                                      if (gate && when_busy == WhenBusy::wait)
                                        opener = std::thread([&] { gate->wait_for_one(), gate->open(); });
                                      report(session, ++number);
                                      session.report({{"number", 2.5}});  // waits for nobody
                                      if (gate) gate->open();
                                    });
    if (opener.joinable()) opener.join();
    EXPECT_EQ(code, 0) << text_of(result);
    const bool waits = when_busy == WhenBusy::wait;
    EXPECT_EQ(names_in(result), (std::vector<std::string>{"checkpoint_000000", waits ? "checkpoint_000001" : "", ""}));
    EXPECT_EQ(result->checkpoint->to_dict().values.at("number"), waits ? 2 : 1);
  }
}

TEST(AsyncSave, ThatFailsIsAnErrorOfTheNextReportEverywhere) {
  const auto storage = test::shared_folder();
  auto gate = gate_on_rank_0("run/", ENOSPC);
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        std::int64_t number = 1;
        report(session, number);
        std::string error = "no error";
        try {
          report(session, ++number);
        } catch (const Error& thrown) {
          error = thrown.what();
          EXPECT_EQ(thrown.code(), ExitCode::retry);
        }
        EXPECT_NE(error.find("No space left"), std::string::npos) << error;
        expect_same_everywhere(error);
        gate.reset();
        report(session, ++number);
      });
  EXPECT_EQ(code, 0) << text_of(result);
  // Its index is not used again, and its row does not name it.
  EXPECT_EQ(names_in(result), (std::vector<std::string>{"", "checkpoint_000001"}));
  EXPECT_EQ(result->checkpoint->to_dict().values.at("number"), 3);
}

TEST(AsyncSave, ThatFailsIsAnErrorBeforeTheNextReportAsksCallbacks) {
  struct Counting : Callback {
    Metrics metrics() override { return {{"asked", ++asked}}; }
    void on_report(const Json&) override { ++reports; }
    std::int64_t asked = 0, reports = 0;
  };
  const auto counting = std::make_shared<Counting>();
  const auto storage = test::shared_folder();
  auto gate = gate_on_rank_0("run/", ENOSPC);
  auto options = with("run", {.async_save = true});
  options.run_config.callbacks = {counting};
  const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
    std::int64_t number = 1;
    report(session, number);
    EXPECT_THROW(report(session, ++number), Error);
    EXPECT_EQ(counting->asked, 1);
    EXPECT_EQ(counting->reports, 1);
    gate.reset();
    report(session, ++number);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(counting->asked, 2);
  ASSERT_EQ(result->metrics_history.size(), 2u);
  EXPECT_EQ(result->metrics_history.back().at("training_iteration"), 2);
}

TEST(AsyncSave, ThatFailsLastEndsTheRunWithItsError) {
  const auto storage = test::shared_folder();
  const auto gate = gate_on_rank_0("run/", ENOSPC);
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        std::int64_t number = 1;
        report(session, number);
      });
  EXPECT_EQ(code, 75);
  EXPECT_NE(text_of(result).find("No space left"), std::string::npos) << text_of(result);
  EXPECT_EQ(names_in(result), std::vector<std::string>{""});
  EXPECT_FALSE(result->checkpoint);
}

TEST(AsyncSave, ThatFailsOnOneRankAloneFailsOnAll) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        auto values = at::full({3'200'000}, 1.0, at::kDouble);
        auto state = session.state({{"values", values}});
        session.report({}, state);
        session.get_checkpoint();  // which waits for it
        const int last = session.world_size() - 1;
        auto sick = session.world_rank() == last ? std::make_unique<test::IoError>("open", "state.h5", EIO) : nullptr;
        session.barrier();
        session.report({}, state);
        std::string error = "no error";
        try {
          session.report({}, state);
        } catch (const Error& thrown) {
          error = thrown.what();
          EXPECT_EQ(thrown.code(), ExitCode::retry);
        }
        EXPECT_NE(error.find("Input/output error"), std::string::npos) << error;
        EXPECT_EQ(error.find("rank " + std::to_string(last) + " (") == 0, last > 0) << error;
        expect_same_everywhere(error);
        sick.reset();
        session.report({}, state);
      });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(names_in(result), (std::vector<std::string>{"checkpoint_000000", "", "checkpoint_000002"}));
  EXPECT_EQ(list_checkpoints(storage / "run").size(), 2u);
}

TEST(AsyncSave, ThatPrunesLeavesTheCheckpointThatIsHandedOut) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("run", {.num_to_keep = 1, .async_save = true})}, [&](Session& session, const Config&) {
        std::int64_t number = 1;
        auto state = session.state({{"number", number}});
        for (; number < 6; ++number) {
          session.report({}, state);
          const auto newest = session.get_checkpoint();
          ASSERT_TRUE(newest);
          EXPECT_EQ(newest->to_dict().values.at("number"), number);
        }
      });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(list_checkpoints(storage / "run").size(), 1u);
}

TEST(AsyncSave, KeepsTheBestAndTheNewest) {
  const auto storage = test::shared_folder();
  const CheckpointConfig config{.num_to_keep = 2, .checkpoint_score_attribute = "score", .async_save = true};
  const auto [code, result] = run({storage, {}, with("run", config)}, [&](Session& session, const Config&) {
    std::int64_t number = 0;
    auto state = session.state({{"number", number}});
    for (const int score : {2, 9, 1, 3, 0}) session.report({{"score", score}}, state);
  });
  EXPECT_EQ(code, 0) << text_of(result);
  std::vector<int> kept;
  for (const auto& info : list_checkpoints(storage / "run")) kept.push_back(info.index);
  EXPECT_EQ(kept, (std::vector<int>{1, 3, 4}));
  std::vector<int> scores;
  for (const auto& [checkpoint, metrics] : result->best_checkpoints) scores.push_back(metrics.at("score"));
  EXPECT_EQ(scores, (std::vector<int>{9, 3, 0})) << "the best first";
}

TEST(AsyncSave, IsNotLostWhereTrainingFails) {
  const auto storage = test::shared_folder();
  auto gate = gate_on_rank_0();
  std::thread opener;
  int attempts = 0;
  std::int64_t number = 1, restored = 0;
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true}, 1)}, [&](Session& session, const Config&) {
        auto state = session.state({{"number", number}});
        if (++attempts == 2) {
          EXPECT_TRUE(state.restore());
          restored = number;
          return;
        }
        number = 7;
        session.report({}, state);
        number = 8;
        if (gate) opener = std::thread([&] { gate->wait_for_one(), gate->open(); });
        if (session.world_rank() == session.world_size() - 1) throw std::runtime_error("an error of one rank");
        session.barrier();
      });
  if (opener.joinable()) opener.join();
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(attempts, 2);
  EXPECT_EQ(restored, 7);
}

TEST(AsyncSave, GivesWayToAStopWhichSavesAtOnce) {
  const auto storage = test::shared_folder();
  auto gate = gate_on_rank_0();
  std::thread opener;
  // Enough time for the first report.
  const auto [code, result] = test::launch({storage, {"--time-limit", "5"}}, [&](Launch& launch) {
    const auto train = [&](Session& session, const Config&) {
      std::int64_t number = 1;
      auto state = session.state({{"number", number}});
      if (gate) opener = std::thread([&] { gate->wait_for_one(), gate->open(); });
      session.report({}, state);
      while (!launch.stop_requested()) std::this_thread::yield();
      number = 2;
      session.report({}, state);
    };
    return TorchTrainer(launch, train, with("run", {.async_save = true, .when_busy = WhenBusy::drop})).fit();
  });
  if (opener.joinable()) opener.join();
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(list_checkpoints(storage / "run").size(), 2u);
  EXPECT_EQ(result->checkpoint->to_dict().values.at("number"), 2);
}

TEST(AsyncSave, ThatIsUnderWayIsFinishedWhereTheRunIsAskedToStop) {
  const auto storage = test::shared_folder();
  for (const auto when_busy : {WhenBusy::drop, WhenBusy::wait})
    for (const bool reports : {true, false}) {
      const auto name = (when_busy == WhenBusy::drop ? "drop" : "wait") + std::to_string(reports);
      const auto gate = gate_on_rank_0();
      std::thread opener;
      const auto [code, result] = run({storage, {}, with(name, {.async_save = true, .when_busy = when_busy})},
                                      [&](Session& session, const Config&) {
                                        std::int64_t number = 1;
                                        auto state = session.state({{"number", number}});
                                        session.report({}, state);
                                        if (session.world_rank() == 0) detail::write_file(storage / name / "stop", "");
                                        while (!session.should_stop()) std::this_thread::yield();
                                        if (gate) opener = std::thread([&] { gate->wait_for_one(), gate->open(); });
                                        number = 2;
                                        if (reports) session.report({}, state);
                                      });
      if (opener.joinable()) opener.join();
      EXPECT_EQ(code, 85) << text_of(result);
      EXPECT_EQ(list_checkpoints(storage / name).size(), reports ? 2u : 1u);
      EXPECT_EQ(result->checkpoint->to_dict().values.at("number"), reports ? 2 : 1);
    }
}

TEST(AsyncSave, TakesItsTimeFromTheEndOfTheRun) {
  const auto storage = test::shared_folder();
  auto gate = gate_on_rank_0();
  std::thread opener;
  double seconds = 0;
  const auto [code, result] = test::launch({storage, {"--time-limit", "9"}}, [&](Launch& launch) {
    const auto begin = std::chrono::steady_clock::now();
    const auto train = [&](Session& session, const Config&) {
      std::int64_t number = 1;
      auto state = session.state({{"number", number}});
      if (gate)
        opener = std::thread([&] {
          gate->wait_for_one();
          std::this_thread::sleep_for(std::chrono::seconds(1));  // so slow is the disk
          gate->open();
        });
      session.report({}, state);
      session.get_checkpoint();
      session.report({});
      while (!session.should_stop()) std::this_thread::yield();
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      session.report({}, state);
    };
    return TorchTrainer(launch, train, with("run", {.async_save = true})).fit();
  });
  if (opener.joinable()) opener.join();
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_LT(seconds, 7) << "no time is kept for a save as slow as the one before";
  EXPECT_EQ(list_checkpoints(storage / "run").size(), 2u);
}

TEST(AsyncSave, FindsCopiesThatAreNotAlikeAtTheReport) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no copies";
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        auto values = at::full({3'200'000}, session.world_rank(), at::kDouble);
        auto state = session.state({{"values", values}});
        session.report({}, state);
      });
  EXPECT_EQ(code, 1);
  EXPECT_NE(text_of(result).find("saving values: not the same on all ranks"), std::string::npos) << text_of(result);
  EXPECT_TRUE(list_checkpoints(storage / "run").empty());
}

TEST(AsyncSave, StoresRank0sOfAModelThatHasDrifted) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("run", {.async_save = true})}, [&](Session& session, const Config&) {
        torch::nn::Linear net(2500, 2500);
        const at::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.fill_(session.world_rank() + 1);
        auto state = session.state({{"model", net}});
        session.report({}, state);
        for (auto& parameter : net->parameters()) parameter.fill_(9);
      });
  EXPECT_EQ(code, 0) << text_of(result);
  for (const auto& [name, tensor] : result->checkpoint->to_dict().tensors)
    EXPECT_TRUE(at::equal(tensor, at::ones_like(tensor))) << name;
}

// ---- The fast tier, when a job has ended between its two commits.

using detail::checkpoint::CheckpointContents;
using detail::checkpoint::CheckpointStore;
using detail::checkpoint::may_hold_newer;
using detail::storage::FolderTier;

CheckpointContents contents_of(int value) {
  return {.state = {.tensors = {{"model/w", at::full({3'200'000}, value, at::kDouble)}}, .values = {{"model", Json()}}},
          .random_state = "rank " + std::to_string(world().rank()),
          .directory = {},
          .position_json = {{"training_iteration", value}, {"epoch", value}}};
}

double value_in(const CheckpointStore& store, const Checkpoint& checkpoint) {
  return store.read(checkpoint).state.tensors.at("model/w").mean().item<double>();
}

class Tiers : public testing::TestWithParam<int> {
 protected:
  /// All ranks on one node, or each rank on its own node; the hosts are numbered unless all have one name.
  Communicator ranks(const std::string& host = "host", bool numbered = true) const {
    detail::comm::Placement placement;
    for (int rank = 0; rank < world().size(); ++rank) {
      placement.node_of_rank.push_back(GetParam() == 1 ? 0 : rank);
      placement.hosts.push_back(GetParam() == 1 || !numbered ? host : host + std::to_string(rank));
    }
    return detail::comm::make_world(world(), placement);
  }
  /// Runs it on rank 0 while the others wait.
  void by_rank_0(const std::function<void()>& work) const {
    world().barrier();
    if (world().rank() == 0) work();
    world().barrier();
  }
  /// The folders of all nodes, in `parent`.
  std::vector<fs::path> nodes_in(const fs::path& parent) const {
    std::vector<fs::path> nodes;
    for (const auto& entry : fs::directory_iterator(parent)) nodes.push_back(entry.path());
    return nodes;
  }
  void move_all(const fs::path& from, const fs::path& to) const {
    by_rank_0([&] {
      for (const auto& node : nodes_in(from)) fs::rename(node, to / node.filename());
    });
  }
  /// The checkpoint from which a start resumes, and what rank 0 logs meanwhile.
  struct Started {
    double value = 0;
    std::string said = {};
  };
  Started start(const Communicator& job, CheckpointConfig config = {}) const {
    return start_in(folder, job, std::move(config));
  }
  Started start_in(const fs::path& run, const Communicator& job, CheckpointConfig config) const {
    const auto log = logs / "log";
    Started started;
    {
      const detail::log::Scope as_before;
      detail::log::configure(world().rank(), detail::log::Level::info);
      if (world().rank() == 0) detail::log::write_to(log);
      CheckpointStore store(job, run, std::move(config));
      if (const auto newest = store.newest()) started.value = value_in(store, *newest);
    }
    world().barrier();
    if (world().rank() == 0) started.said = detail::read_file(log);
    by_rank_0([&] { fs::remove(log); });
    return started;
  }
  void expect_said(const Started& started, const std::vector<std::string>& parts) const {
    if (world().rank() != 0) return;
    for (const auto& part : parts)
      EXPECT_NE(started.said.find(part), std::string::npos) << part << ": " << started.said;
  }
  /// Makes two saves; the second does not reach the run's folder.
  void save_two() {
    CheckpointStore store(communicator, folder, {.fast_tier = fast});
    store.commit(contents_of(1));
    EXPECT_FALSE(store.finish());
    const auto gate = gate_on_rank_0(folder.filename().string() + "/.checkpoint", EIO);
    EXPECT_EQ(store.commit(contents_of(2)).path(), folder / "checkpoint_000001");
    const auto error = store.finish();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ExitCode::retry);
  }
  const fs::path folder = test::shared_folder(), fast = test::shared_folder(), logs = test::shared_folder();
  const Communicator communicator = ranks();
};
INSTANTIATE_TEST_SUITE_P(FastTier, Tiers, testing::Values(1, 2));

TEST_P(Tiers, WhatWasNotCopiedIsCopiedAtTheNextStart) {
  save_two();
  CheckpointStore store(communicator, folder, {});  // though no fast tier is wanted any more
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), folder / "checkpoint_000001");
  EXPECT_EQ(value_in(store, *newest), 2);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
}

TEST_P(Tiers, OfARunAreNotThoseOfItsCopy) {
  save_two();
  const auto copies = test::shared_folder();
  for (const bool in_use : {true, false}) {  // the second time the copy has used a tier of its own
    const auto copy = copies / (in_use ? "first" : "second");
    by_rank_0([&] { fs::copy(folder, copy, fs::copy_options::recursive); });
    const auto there = nodes_in(fast);
    const auto started = start_in(copy, communicator, {});
    EXPECT_EQ(started.value, 2);
    expect_said(started, {"copy of another run's folder", "muster-"});
    EXPECT_FALSE(fs::exists(copy / "fast_tier.json"));
    EXPECT_EQ(nodes_in(fast), there);
    world().barrier();
    if (!in_use) continue;
    CheckpointStore store(communicator, copy, {.fast_tier = fast});
    store.commit(contents_of(3));
    EXPECT_FALSE(store.finish());
  }
  world().barrier();
  EXPECT_EQ(start(communicator).value, 2);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
}

TEST_P(Tiers, ACopyTakesWhatWasThereWhenItWasMade) {
  const auto early = test::shared_folder() / "early", late = early.parent_path() / "late";
  {
    CheckpointStore store(communicator, folder, {.fast_tier = fast});
    const auto gate = gate_on_rank_0(folder.filename().string() + "/.checkpoint", EIO);
    for (int number = 1; number < 3; ++number) {
      store.commit(contents_of(number));
      EXPECT_TRUE(store.finish());
      by_rank_0([&] { fs::copy(folder, number == 1 ? early : late, fs::copy_options::recursive); });
    }
  }
  EXPECT_EQ(start_in(late, communicator, {}).value, 2);
  const auto started = start_in(early, communicator, {});
  EXPECT_EQ(started.value, 0);
  expect_said(started, {"checkpoint_000000 is not in the fast tier", "which holds checkpoint_000001"});
}

TEST_P(Tiers, ARunIsItselfWhereNoBirthTimeIsSeen) {
  save_two();
  by_rank_0([&] {
    auto note = detail::read_json(folder / "fast_tier.json");
    for (auto& tier : note) {
      const auto identity = tier.at("run").get<std::string>();
      tier["run"] = identity.substr(0, identity.find(' '));
    }
    std::ofstream(folder / "fast_tier.json") << note.dump();
  });
  const auto started = start(communicator);
  EXPECT_EQ(started.value, 2);
  EXPECT_EQ(started.said.find("copy of another run"), std::string::npos) << started.said;
}

TEST_P(Tiers, WhatIsGivenUpIsRemovedWhenItsNodeIsBack) {
  save_two();
  const auto away = test::shared_folder();
  move_all(fast, away);
  {
    CheckpointStore store(ranks("other"), folder, {});
    store.commit(contents_of(3));
  }
  world().barrier();
  EXPECT_FALSE(may_hold_newer(FolderTier(folder)));
  move_all(away, fast);
  EXPECT_EQ(start(communicator).value, 3);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
  EXPECT_FALSE(fs::exists(folder / "fast_tier.json"));
}

TEST_P(Tiers, WhatIsInTheRunsFolderInPartIsCopiedAgain) {
  save_two();
  if (world().rank() == 0) {
    fs::create_directory(folder / "checkpoint_000001");
    fs::copy(folder / "checkpoint_000000" / "manifest.json", folder / "checkpoint_000001");
  }
  world().barrier();
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), folder / "checkpoint_000001");
  EXPECT_EQ(value_in(store, *newest), 2);
}

TEST_P(Tiers, WithoutOneOfTheNodesTheRunGoesOnFromItsFolder) {
  save_two();
  const int last = world().size() - 1;
  if (world().rank() == last)
    for (const auto& entry : fs::directory_iterator(fast))
      if (entry.path().string().ends_with(communicator.topology().hosts[static_cast<std::size_t>(last)]))
        fs::remove_all(entry.path());
  world().barrier();
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), folder / "checkpoint_000000");
  EXPECT_EQ(value_in(store, *newest), 1);
  EXPECT_EQ(store.commit(contents_of(3)).path(), folder / "checkpoint_000001");
  EXPECT_FALSE(store.finish());
  const auto after = store.newest();
  ASSERT_TRUE(after);
  EXPECT_EQ(value_in(store, *after), 3);
}

TEST_P(Tiers, WhatCannotBeCopiedDoesNotPileUp) {
  {
    CheckpointStore store(communicator, folder, {.fast_tier = fast});
    const auto gate = gate_on_rank_0(folder.filename().string() + "/.checkpoint", EIO);
    for (int number = 1; number < 4; ++number) {
      store.commit(contents_of(number));
      EXPECT_TRUE(store.finish());
      world().barrier();
      for (const auto& node : fs::directory_iterator(fast)) EXPECT_EQ(list_checkpoints(node.path()).size(), 1u);
      world().barrier();
    }
  }
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(value_in(store, *newest), 3);
}

TEST_P(Tiers, WhatOneNodeCannotPublishIsOnNone) {
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  store.commit(contents_of(1));
  EXPECT_FALSE(store.finish());
  const auto last = static_cast<std::size_t>(world().size() - 1);
  if (world().rank() == world().size() - 1)
    for (const auto& node : fs::directory_iterator(fast))
      if (node.path().string().ends_with(communicator.topology().hosts[last]))
        fs::create_directories(node.path() / "checkpoint_000001");
  world().barrier();
  EXPECT_THROW(store.commit(contents_of(2)), Error);
  EXPECT_FALSE(store.finish());
  world().barrier();
  for (const auto& node : fs::directory_iterator(fast)) EXPECT_TRUE(fs::is_empty(node.path()));
  world().barrier();
  EXPECT_EQ(store.commit(contents_of(3)).path(), folder / "checkpoint_000002");
  EXPECT_FALSE(store.finish());
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(value_in(store, *newest), 3);
}

TEST_P(Tiers, WhatOneNodeCannotRemoveIsNotInTheWayOfTheNextSave) {
  if (GetParam() == 1 || world().size() == 1) GTEST_SKIP() << "there is one node";
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  store.commit(contents_of(1));
  EXPECT_FALSE(store.finish());
  by_rank_0([&] {
    for (const auto& node : nodes_in(fast))
      if (!node.string().ends_with("host0")) fs::create_directories(node / "checkpoint_000001");
  });
  {
    // The first node publishes it; the others do not.
    const test::IoError sick("renameat2", ".checkpoint_000001.pruning", EIO);
    EXPECT_THROW(store.commit(contents_of(2)), Error);
  }
  store.commit(contents_of(3));
  EXPECT_FALSE(store.finish());
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(value_in(store, *newest), 3);
}

TEST_P(Tiers, WhatCannotBeReadStaysUntilItCan) {
  save_two();
  {
    // Only the tier has a checkpoint of that number.
    const test::IoError sick("open", "checkpoint_000001/manifest.json", EIO);
    const auto started = start(communicator, {.fast_tier = fast});
    EXPECT_EQ(started.value, 1);
    expect_said(started, {"checkpoint_000001", fast.string(), "Input/output error"});
  }
  EXPECT_EQ(start(communicator).value, 2);
  EXPECT_TRUE(fs::is_empty(fast));
}

TEST_P(Tiers, WhatANewerMusterHasWrittenStays) {
  save_two();
  std::map<fs::path, std::string> whole;
  by_rank_0([&] {
    for (const auto& node : nodes_in(fast)) {
      const auto manifest = node / "checkpoint_000001" / "manifest.json";
      whole[manifest] = detail::read_file(manifest);
      detail::write_file(manifest, test::forge(node / "checkpoint_000001", [](Json& json) { json["version"] = 2; }));
    }
  });
  const auto started = start(communicator);
  EXPECT_EQ(started.value, 1);
  expect_said(started, {"checkpoint_000001", fast.string(), "newer muster"});
  by_rank_0([&] {
    for (const auto& [manifest, text] : whole) detail::write_file(manifest, text);
  });
  EXPECT_EQ(start(communicator).value, 2);
}

TEST_P(Tiers, NodesThatComeBackAreAskedAgain) {
  save_two();
  EXPECT_TRUE(may_hold_newer(FolderTier(folder)));
  const auto away = test::shared_folder();
  move_all(fast, away);
  for (const auto& config : {CheckpointConfig{}, CheckpointConfig{.fast_tier = fast}}) {
    const auto started = start(communicator, config);
    EXPECT_EQ(started.value, 1);
    expect_said(started, {fast.string(), "muster-", communicator.topology().hosts.back()});
    EXPECT_TRUE(fs::is_empty(fast));
    world().barrier();
  }
  move_all(away, fast);
  EXPECT_EQ(start(communicator).value, 2);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
  EXPECT_FALSE(fs::exists(folder / "fast_tier.json"));
}

TEST_P(Tiers, ANewerCheckpointInTheRunsFolderEndsTheWaitForNodes) {
  for (const bool through_a_tier : {false, true}) {
    save_two();
    const auto away = test::shared_folder();
    move_all(fast, away);
    {
      CheckpointStore store(communicator, folder, {.fast_tier = through_a_tier ? fast : fs::path()});
      // It does not matter if it has as many reports as the lost one, since the run has gone on without that one.
      store.commit(contents_of(3));
      EXPECT_FALSE(store.finish());
    }
    world().barrier();
    EXPECT_FALSE(fs::exists(folder / "fast_tier.json"));
    move_all(away, fast);
    EXPECT_EQ(start(communicator).value, 3);
    by_rank_0([&] {
      for (const auto& path : {folder, fast})
        for (const auto& entry : fs::directory_iterator(path)) fs::remove_all(entry.path());
    });
  }
}

TEST_P(Tiers, WhatWasRolledBackIsNotTakenAfterAKill) {
  save_two();
  const auto away = test::shared_folder();
  const auto note = detail::read_file(folder / "fast_tier.json");
  move_all(fast, away);
  {
    CheckpointStore store(communicator, folder, {});
    EXPECT_TRUE(store.newest());
    store.roll_back(0);
    store.confirm_rollback();
  }
  // As if the job had been killed after it recorded the rollback, and before it removed the tier.
  by_rank_0([&] { detail::write_file(folder / "fast_tier.json", note); });
  move_all(away, fast);
  EXPECT_EQ(start(communicator).value, 1);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
  EXPECT_FALSE(fs::exists(folder / "fast_tier.json"));
}

TEST_P(Tiers, AHostMayHaveAnotherNameNextTime) {
  save_two();
  EXPECT_EQ(start(ranks("other")).value, 2);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
}

TEST_P(Tiers, HostsOfOneNameMayShareTheFolder) {
  const auto job = ranks("localhost", /*numbered=*/false);
  {
    CheckpointStore store(job, folder, {.fast_tier = fast});
    const auto gate = gate_on_rank_0(folder.filename().string() + "/.checkpoint", EIO);
    store.commit(contents_of(1));
    EXPECT_TRUE(store.finish());
  }
  EXPECT_EQ(start(job).value, 1);
  world().barrier();
  EXPECT_TRUE(fs::is_empty(fast));
}

TEST_P(Tiers, WhatIsCopiedIsNotMissedOnOtherNodes) {
  {
    CheckpointStore store(communicator, folder, {.fast_tier = fast});
    EXPECT_FALSE(may_hold_newer(FolderTier(folder)));
    store.commit(contents_of(1));
    EXPECT_FALSE(store.finish());
    EXPECT_FALSE(may_hold_newer(FolderTier(folder)));
    EXPECT_TRUE(fs::exists(folder / "fast_tier.json"));
    struct stat status {};
    ASSERT_EQ(::stat((folder / "fast_tier.json").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    world().barrier();
  }
  world().barrier();
  EXPECT_FALSE(fs::exists(folder / "fast_tier.json")) << "it outlives its job";
  const auto started = start(communicator);
  EXPECT_EQ(started.value, 1);
  EXPECT_EQ(started.said.find("fast tier"), std::string::npos) << started.said;
}

TEST_P(Tiers, WhatOthersMayWriteToIsNotTaken) {
  save_two();
  by_rank_0([&] {
    for (const auto& node : nodes_in(fast)) ::chmod(node.c_str(), 0770);
  });
  const auto started = start(communicator);
  EXPECT_EQ(started.value, 1);
  expect_said(started, {"left alone, with checkpoint_000001"});
  by_rank_0([&] {
    EXPECT_FALSE(fs::is_empty(fast)) << "it was removed";
    for (const auto& node : nodes_in(fast)) ::chmod(node.c_str(), 0700);
    if (::geteuid() != 0) return;
    for (const auto& node : nodes_in(fast)) EXPECT_EQ(::chown(node.c_str(), 54321, 54321), 0);
  });
  if (::geteuid() == 0) {
    const auto of_another = start(communicator);
    EXPECT_EQ(of_another.value, 1);
    expect_said(of_another, {"it belongs to user 54321", "left alone, with checkpoint_000001"});
    by_rank_0([&] {
      for (const auto& node : nodes_in(fast)) EXPECT_EQ(::chown(node.c_str(), 0, 0), 0);
    });
  }
  EXPECT_EQ(start(communicator).value, 2);
}

TEST_P(Tiers, ANoteOfAnotherUserIsLeftAlone) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make files of other users";
  save_two();
  const auto note = folder / "fast_tier.json";
  const auto text = detail::read_file(note);
  by_rank_0([&] { EXPECT_EQ(::chown(note.c_str(), 54321, 54321), 0); });
  const auto started = start(communicator, {.fast_tier = fast});
  EXPECT_EQ(started.value, 1);
  expect_said(started, {"fast_tier.json belongs to user 54321", "checkpoint_000000"});
  EXPECT_FALSE(may_hold_newer(FolderTier(folder)));
  {
    CheckpointStore store(communicator, folder, {.fast_tier = fast});
    EXPECT_EQ(store.commit(contents_of(3)).path(), folder / "checkpoint_000001");
    EXPECT_FALSE(store.finish());
  }
  world().barrier();
  EXPECT_EQ(detail::read_file(note), text);
  EXPECT_FALSE(fs::is_empty(fast)) << "what belongs to the note was removed";
}

TEST_P(Tiers, NoFileThereSaysWhatIsCopied) {
  save_two();
  const auto planted = "planted" + std::to_string(::getpid());
  by_rank_0([&] {
    const auto nodes = nodes_in(fast);
    detail::write_file(fast / planted, "by somebody else");
    for (const auto& node : nodes)
      detail::write_file(node / "checkpoint_000001" / ".share.json",
                         Json{{"pieces", {0, 1, 1'000'000}}, {"files", {"../../" + planted}}}.dump());
  });
  EXPECT_EQ(start(communicator).value, 2);
  EXPECT_FALSE(fs::exists(folder.parent_path() / planted));
  fs::remove(folder.parent_path() / planted);
}

TEST_P(Tiers, EachNodeHasSpaceForItsOwnShareOnly) {
  save_two();
  std::uint64_t bytes = 0, allocated = 0;
  for (const auto& node : nodes_in(fast)) {
    struct stat status {};
    ASSERT_EQ(::stat((node / "checkpoint_000001" / "state.h5").c_str(), &status), 0);
    bytes = static_cast<std::uint64_t>(status.st_size);
    allocated += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  EXPECT_GT(bytes, 25'000'000u);
  EXPECT_LT(allocated, bytes + bytes / 4);
}

TEST_P(Tiers, AnOlderOneIsTakenWhereTheNewestIsNotOnAllNodes) {
  if (GetParam() == 1 || world().size() == 1) GTEST_SKIP() << "there is one node";
  save_two();
  // As if the job had been killed when one node had published the next one and the others had not.
  if (world().rank() == 0)
    for (const auto& node : fs::directory_iterator(fast))
      if (node.path().string().ends_with("host0"))
        fs::copy(node.path() / "checkpoint_000001", node.path() / "checkpoint_000002");
  world().barrier();
  CheckpointStore store(communicator, folder, {.fast_tier = fast});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), folder / "checkpoint_000001");
  EXPECT_EQ(value_in(store, *newest), 2);
}

TEST(FastTier, WhatIsThereAloneIsARunThatHasBegun) {
  const auto storage = test::shared_folder(), fast = test::shared_folder();
  const auto options = with("run", {.fast_tier = fast});
  {
    const auto gate = gate_on_rank_0("run/", EIO);
    std::int64_t number = 7;
    const auto train = [&](Session& session, const Config&) { report(session, number); };
    EXPECT_EQ(run({storage, {}, options}, train).first, 75);
  }
  EXPECT_TRUE(list_checkpoints(storage / "run").empty());
  EXPECT_TRUE(TorchTrainer::can_restore(storage / "run"));
  world().barrier();
  const auto nothing = [](Session&, const Config&) { ADD_FAILURE() << "it trains"; };
  EXPECT_EQ(run({storage, {"--resume", "never"}, options}, nothing).first, 64);
  std::int64_t restored = 0;
  const auto [code, result] = test::launch({storage}, [&](Launch& launch) {
    const auto train = [&](Session& session, const Config&) {
      auto state = session.state({{"number", restored}});
      EXPECT_TRUE(state.restore());
    };
    return TorchTrainer::restore(launch, storage / "run", train, {.datasets = options.datasets}).fit();
  });
  EXPECT_EQ(code, 0) << text_of(result);
  EXPECT_EQ(restored, 7);
}

TEST(FastTier, AnotherRunIsToldOfWhatIsStillThere) {
  const auto storage = test::shared_folder(), fast = test::shared_folder();
  const auto start_first = [&](std::int64_t number, CheckpointConfig config) {
    const auto gate = config.fast_tier.empty() ? nullptr : gate_on_rank_0("first/", EIO);
    const auto train = [&](Session& session, const Config&) {
      session.report({{"number", number}}, session.state({{"number", number}}));
      throw std::runtime_error("interrupted");
    };
    EXPECT_NE(run({storage, {}, with("first", std::move(config))}, train).first, 0);
    world().barrier();
  };
  std::int64_t restored = 0;
  const auto start_second = [&] {
    const auto train = [&](Session& session, const Config&) {
      EXPECT_TRUE(session.state({{"number", restored}}).restore());
    };
    const auto [code, result] = run({storage, {"--resume", storage / "first"}, with("second", {})}, train);
    world().barrier();
    return code;
  };
  start_first(7, {.fast_tier = fast});
  EXPECT_EQ(start_second(), 65) << "the only checkpoint is in the fast tier";
  start_first(8, {});  // copies what is there
  start_first(9, {.fast_tier = fast});
  EXPECT_EQ(start_second(), 0);
  EXPECT_EQ(restored, 8);
  const auto log = detail::read_file(storage / "second" / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("may still be in its fast tier"), std::string::npos) << log;
}

TEST(FastTier, ACheckpointThatIsGoneFromItIsNamed) {
  const auto storage = test::shared_folder(), fast = test::shared_folder();
  std::int64_t number = 7;
  const auto train = [&](Session& session, const Config&) {
    session.report({{"number", number}}, session.state({{"number", number}}));
    throw std::runtime_error("interrupted");
  };
  EXPECT_NE(run({storage, {}, with("run", {})}, train).first, 0);
  {
    const auto gate = gate_on_rank_0("run/", EIO);
    number = 8;
    EXPECT_NE(run({storage, {}, with("run", {.fast_tier = fast})}, train).first, 0);
  }
  world().barrier();
  if (world().rank() == 0)
    for (const auto& tier : std::filesystem::directory_iterator(fast))
      for (const auto& checkpoint : std::filesystem::directory_iterator(tier.path()))
        std::filesystem::remove_all(checkpoint.path());
  world().barrier();
  std::int64_t restored = 0;
  const auto resume = [&](Session& session, const Config&) {
    EXPECT_TRUE(session.state({{"number", restored}}).restore());
  };
  EXPECT_EQ(run({storage, {"--log-level", "warn"}, with("run", {})}, resume).first, 0);
  EXPECT_EQ(restored, 7);
  world().barrier();
  const auto log = detail::read_file(storage / "run" / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("checkpoint_000001 may have been in the fast tier"), std::string::npos) << log;
}

TEST(FastTier, ThatWasNeverUsedIsNone) {
  const auto storage = test::shared_folder();
  const auto options = with("run", {.fast_tier = test::shared_folder()});
  const auto fails = [](Session&, const Config&) { throw std::runtime_error("before the first report"); };
  EXPECT_NE(run({storage, {}, options}, fails).first, 0);
  EXPECT_FALSE(TorchTrainer::can_restore(storage / "run"));
  world().barrier();
  EXPECT_EQ(run({storage, {"--resume", "never"}, options}, [](Session&, const Config&) {}).first, 0);
}

TEST_P(Tiers, WhatIsDamagedThereIsGivenUp) {
  save_two();
  if (world().rank() == 0)
    for (const auto& entry : fs::directory_iterator(fast)) {
      detail::File file(entry.path() / "checkpoint_000001" / "state.h5", detail::File::Mode::write);
      std::vector<std::byte> zeroes(file.size());
      file.write_at(zeroes, 0);
    }
  world().barrier();
  CheckpointStore store(communicator, folder, {});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(value_in(store, *newest), 1);
}

}  // namespace
}  // namespace muster::async_save_test
