// Runs that are asked to stop: all workers do at the same place, what can be saved is, and what goes on ends as if
// nothing had been.
#include "base/file.hpp"
#include "checkpoint/files/manifest.hpp"
#include "comm/make_world.hpp"
#include "launch/part.hpp"
#include "session/prepared_models.hpp"
#include "support/job.hpp"
#include "support/prepared.hpp"

#include "muster/muster.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdlib.h>

#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::stop_test {
namespace {

using test::line;
using test::run;
using test::world;

const std::vector<std::string> at_once{"--time-limit", "0"};

TorchTrainerOptions with_line(std::string name) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", line()}}};
}

struct Fit {
  std::vector<double> weights;  // at the end
  std::int64_t steps = 0;       // taken here
};

/// Three epochs, with a step of the optimizer after every `accumulate` batches. Never reports.
void fit_line(Session& session, Fit& fit, int accumulate = 1, bool no_sync = false,
              const std::function<void(std::int64_t)>& each_step = {}) {
  auto net = session.prepare_model(
      torch::nn::Sequential(torch::nn::Linear(1, 8), torch::nn::Dropout(0.1), torch::nn::Linear(8, 1)));
  torch::optim::Adam optimizer(net->parameters(), 0.05);
  auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for ([[maybe_unused]] auto epoch : session.epochs(3)) {
    int batches = 0;
    for (auto& batch : shard.iter_torch_batches({.global_batch_size = 8, .shuffle = true})) {
      const bool steps = ++batches % accumulate == 0;
      {
        std::unique_ptr<NoSync> alone;
        if (no_sync && !steps) alone.reset(new NoSync(session.no_sync()));
        torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      }
      if (steps) {
        optimizer.step();
        optimizer.zero_grad();
      }
      ++fit.steps;
      if (each_step) each_step(session.global_step());
    }
  }
  fit.weights.clear();
  for (const auto& parameter : net->parameters())
    for (std::int64_t i = 0; i < parameter.numel(); ++i) fit.weights.push_back(parameter.flatten()[i].item<double>());
}

std::string text_of(const std::optional<Result>& result) {
  return result && result->error ? result->error->what() : "no error";
}

std::size_t saved(const std::filesystem::path& run) { return list_checkpoints(run).size(); }

/// A run that is asked to stop where `asked` is true.
std::pair<int, std::optional<Result>> run_until(const bool& asked, const test::Job& job,
                                                const std::function<void(Session&, const Config&)>& loop) {
  return test::launch(job, [&](Launch& whole) {
    Launch launch(whole, {.ranks = detail::comm::make_separate_world(whole.communicator()),
                          .flags = whole.flags(),
                          .asked_to_stop = [&] { return asked; }});
    return TorchTrainer(launch, loop, job.options).fit();
  });
}

void expect_same_everywhere(std::int64_t value) {
  for (const auto& theirs : world().all_gather(std::to_string(value))) EXPECT_EQ(theirs, std::to_string(value));
}

struct Way {
  int accumulate = 1;
  bool no_sync = false;
  int virtual_workers = 0;
};

class Ways : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Stop, Ways,
                         testing::Values(Way{}, Way{.accumulate = 3}, Way{.accumulate = 3, .no_sync = true},
                                         Way{.virtual_workers = 6}));

TEST_P(Ways, InMidEpochIsAtOnePlaceAndGoesOnBitForBit) {
  const auto [accumulate, no_sync, virtual_workers] = GetParam();
  const auto storage = test::shared_folder();
  auto options = with_line("straight");
  if (virtual_workers > 0) options.scaling_config.virtual_workers = virtual_workers;
  Fit straight, stopped;
  run({storage, {}, options},
      [&](Session& session, const Config&) { fit_line(session, straight, accumulate, no_sync); });
  options.run_config.name = "stopped";

  bool asked = false;
  const auto first = run_until(asked, {storage, {}, options}, [&](Session& session, const Config&) {
    fit_line(session, stopped, accumulate, no_sync, [&](std::int64_t step) {
      asked = asked || (step == 7 && session.world_rank() == session.world_size() - 1);
    });
  });
  EXPECT_EQ(first.first, 85) << text_of(first.second);
  EXPECT_EQ(saved(storage / "stopped"), 1u);
  EXPECT_LT(stopped.steps, straight.steps);
  EXPECT_EQ(stopped.steps % accumulate, 0) << "gradients that were added up are lost";
  expect_same_everywhere(stopped.steps);

  const auto before = stopped.steps;
  EXPECT_EQ(run({storage, {}, options},
                [&](Session& session, const Config&) { fit_line(session, stopped, accumulate, no_sync); })
                .first,
            0);
  EXPECT_EQ(stopped.steps, straight.steps) << "stopped after " << before;
  EXPECT_EQ(stopped.weights, straight.weights);
}

/// What a training function makes, and how it trains on a batch.
struct Program {
  StateEntries entries;
  std::function<void(Batch& batch, int number)> train;
};

/// Asks the last rank to stop in that batch, counted from 1. Returns how many batches were trained when it has stopped.
/// `reports`: reports the State after each batch.
int batches_until_it_stops(int asked_in, const std::function<Program(Session&)>& make, bool reports = false) {
  const auto storage = test::shared_folder();
  bool asked = false;
  int batches = 0;
  const auto [code, result] = run_until(asked, {storage, {}, with_line("asked")}, [&](Session& session, const Config&) {
    const auto program = make(session);
    auto state = session.state(program.entries);
    state.restore();
    for ([[maybe_unused]] auto epoch : session.epochs(10))
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
        asked = ++batches >= asked_in && session.world_rank() == session.world_size() - 1;
        program.train(batch, batches);
        if (reports) session.report({{"batches", batches}}, state);
      }
  });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "asked"), reports ? static_cast<std::size_t>(batches) : 1u);
  expect_same_everywhere(batches);
  return batches;
}

enum class Stepped { plainly, prepared, fused };

std::shared_ptr<torch::optim::Optimizer> sgd(Session& session, Stepped by, std::vector<at::Tensor> parameters,
                                             double lr = 0.01) {
  torch::optim::SGD own(std::move(parameters), torch::optim::SGDOptions(lr));
  if (by == Stepped::plainly) return std::make_shared<torch::optim::SGD>(std::move(own));
  return std::make_shared<PreparedOptimizer<torch::optim::SGD>>(
      session.prepare_optimizer(std::move(own), {.fuse = by == Stepped::fused ? Fuse::always : Fuse::never}));
}

torch::nn::Sequential layers(int count) {
  torch::nn::Sequential net(torch::nn::Linear(1, 4));
  for (int i = 2; i < count; ++i) net->push_back(torch::nn::Linear(4, 4));
  net->push_back(torch::nn::Linear(4, 1));
  return net;
}

class Steps : public testing::TestWithParam<Stepped> {};
INSTANTIATE_TEST_SUITE_P(Stop, Steps, testing::Values(Stepped::plainly, Stepped::prepared, Stepped::fused));
class PreparedSteps : public testing::TestWithParam<Stepped> {};
INSTANTIATE_TEST_SUITE_P(Stop, PreparedSteps, testing::Values(Stepped::prepared, Stepped::fused));

TEST_P(Steps, DoesNotWaitForGradientsThatAGanThrowsAway) {
  for (const bool to_none : {true, false}) {
    const auto make = [&](Session& session) -> Program {
      auto generator = session.prepare_model(layers(2)), critic = session.prepare_model(layers(2));
      auto of_generator = sgd(session, GetParam(), generator->parameters());
      auto of_critic = sgd(session, GetParam(), critic->parameters());
      const auto train = [=](Batch& batch, int) mutable {
        const auto &x = batch["x"], &y = batch["y"];
        of_critic->zero_grad(to_none);
        // Without detach() the generator gets gradients too.
        (critic->forward(generator->forward(x)) - critic->forward(y)).square().mean().backward();
        of_critic->step();
        of_generator->zero_grad(to_none);
        critic->forward(generator->forward(x)).square().mean().backward();
        of_generator->step();
      };
      return {{{"generator", generator}, {"critic", critic}}, train};
    };
    EXPECT_LE(batches_until_it_stops(5, make), 6) << to_none;
  }
}

TEST_P(Steps, DoesNotWaitForLayersThatAreNotUsed) {
  const auto make = [](Session& session) -> Program {
    auto net = session.prepare_model(layers(7));
    auto optimizer = sgd(session, GetParam(), net->parameters());
    const auto train = [=](Batch& batch, int) mutable {
      optimizer->zero_grad();
      net[0]->as<torch::nn::Linear>()->forward(batch["x"]).square().mean().backward();
      optimizer->step();
    };
    return {{{"net", net}, {"optimizer", *optimizer}}, train};
  };
  EXPECT_EQ(batches_until_it_stops(5, make), 5);
}

TEST_P(Steps, DoesNotWaitForParametersThatNoOptimizerHas) {
  for (const bool zero_all : {true, false}) {
    const auto make = [&](Session& session) -> Program {
      auto net = session.prepare_model(layers(12));
      auto optimizer = sgd(session, GetParam(), net[3]->parameters());
      const auto train = [=](Batch& batch, int) mutable {
        zero_all ? net->zero_grad() : optimizer->zero_grad();
        net->forward(batch["x"]).square().mean().backward();
        optimizer->step();
      };
      return {{{"net", net}, {"optimizer", *optimizer}}, train};
    };
    EXPECT_LE(batches_until_it_stops(5, make), 6) << zero_all;
  }
}

TEST_P(Steps, WaitsForGradientsThatAreAddedUp) {
  for (const bool zero_first : {true, false}) {
    const auto make = [&](Session& session) -> Program {
      auto net = session.prepare_model(layers(7));
      auto optimizer = sgd(session, GetParam(), net->parameters());
      const auto train = [=](Batch& batch, int number) mutable {
        if (zero_first && number % 3 == 1) optimizer->zero_grad();
        torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
        if (number % 3 != 0) return;
        optimizer->step();
        if (!zero_first) optimizer->zero_grad();
      };
      return {{{"net", net}, {"optimizer", *optimizer}}, train};
    };
    EXPECT_EQ(batches_until_it_stops(4, make), 6) << zero_first;
    EXPECT_EQ(batches_until_it_stops(4, make, /*reports=*/true), 4) << zero_first << ": the report saves them";
  }
}

/// The names of the gradients in the run's newest checkpoint.
std::vector<std::string> saved_gradients(const std::filesystem::path& run) {
  std::vector<std::string> names;
  for (const auto& tensor : detail::checkpoint::read_manifest(list_checkpoints(run).back().path).tensors)
    if (tensor.name.starts_with("gradients/")) names.push_back(tensor.name);
  return names;
}

/// How gradients are added up, and how a run ends while they are.
struct Pending {
  bool no_sync = false;
  bool per_epoch = false;  ///< the program throws away what an epoch leaves over
  bool asynchronous = false;
  bool asked = false;  ///< to stop; otherwise the training function throws
  bool weighted = false;
};

/// Three epochs of five batches, with a step after every second one. Ends after the reported batch `ends_after`.
std::vector<double> fit_in_pairs(const std::filesystem::path& storage, const std::string& name, Stepped by,
                                 const Pending& way, int ends_after = 0, std::size_t gradients = 4) {
  auto options = with_line(name);
  options.run_config.checkpoint_config.async_save = way.asynchronous;
  bool asked = false;
  std::vector<double> weights;
  const auto [code, result] = run_until(asked, {storage, {}, options}, [&](Session& session, const Config&) {
    auto net = layers(2);
    net->to(torch::kDouble);
    session.prepare_model(net);
    auto optimizer = sgd(session, by, net->parameters(), 0.1);
    std::int64_t taken = 0;
    auto state = session.state({{"net", net}, {"optimizer", *optimizer}, {"taken", taken}});
    state.restore();
    for ([[maybe_unused]] auto epoch : session.epochs(3)) {
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 10})) {
        const auto number = way.per_epoch ? taken % 5 : taken;
        if (number % 2 == 0) optimizer->zero_grad();
        {
          // The last of several ranks has nothing in the first batch of a step.
          const bool is_empty = number % 2 == 0 && world().rank() > 0 && world().rank() == world().size() - 1;
          const double weight = is_empty ? 0 : 1.5 + static_cast<double>(taken % 3) + world().rank();
          const auto step = way.weighted ? session.step(batch, weight) : session.step(batch);
          std::unique_ptr<NoSync> alone;
          if (way.no_sync && number % 2 == 0) alone.reset(new NoSync(session.no_sync()));
          torch::mse_loss(net->forward(batch["x"].to(torch::kDouble)), batch["y"].to(torch::kDouble)).backward();
        }
        if (number % 2 == 1) optimizer->step();
        ++taken;
        asked = way.asked && taken == ends_after;
        if (taken % 5 != 0 && taken != 6) continue;
        session.report({{"taken", taken}}, state);
        if (taken == ends_after) throw std::runtime_error("ended here");
      }
    }
    for (const auto& parameter : net->parameters())
      for (std::int64_t i = 0; i < parameter.numel(); ++i) weights.push_back(parameter.flatten()[i].item<double>());
  });
  EXPECT_EQ(code, ends_after == 0 ? 0 : way.asked ? 85 : 1) << text_of(result);
  world().barrier();
  if (ends_after > 0) {
    EXPECT_EQ(saved_gradients(storage / name).size(), gradients) << name;
  }
  return weights;
}

TEST_P(Steps, GradientsThatAreAddedUpAtAReportAreSavedWithTheState) {
  const auto storage = test::shared_folder();
  int number = 0;
  for (const Pending way : {Pending{}, Pending{.no_sync = true}, Pending{.per_epoch = true},
                            Pending{.asynchronous = true}, Pending{.no_sync = true, .asked = true},
                            Pending{.weighted = true}, Pending{.no_sync = true, .weighted = true}}) {
    const auto name = "pairs_" + std::to_string(static_cast<int>(GetParam())) + "_" + std::to_string(number++);
    const auto straight = fit_in_pairs(storage, name + "_straight", GetParam(), way);
    fit_in_pairs(storage, name, GetParam(), way, 5);
    // The next epoch begins in mid-step, or anew: the batch after its first one adds to the gradients of that.
    fit_in_pairs(storage, name, GetParam(), way, 6, way.per_epoch ? 4 : 0);
    const auto resumed = fit_in_pairs(storage, name, GetParam(), way);
    ASSERT_EQ(resumed.size(), straight.size());
    // Where the ranks' own gradients differ, their average is saved.
    const bool exact = world().size() == 1 || (!way.no_sync && GetParam() != Stepped::fused);
    for (std::size_t i = 0; i < resumed.size(); ++i)
      EXPECT_NEAR(resumed[i], straight[i], exact ? 0 : 1e-12) << name << " " << i;
  }
}

TEST_P(Steps, OfAGanAreNotSaved) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, with_line("gan")}, [&](Session& session, const Config&) {
    auto generator = session.prepare_model(layers(2)), critic = session.prepare_model(layers(2));
    auto of_generator = sgd(session, GetParam(), generator->parameters());
    auto of_critic = sgd(session, GetParam(), critic->parameters());
    auto state = session.state({{"generator", generator}, {"critic", critic}});
    for ([[maybe_unused]] auto epoch : session.epochs(2)) {
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
        of_critic->zero_grad();
        critic->forward(generator->forward(batch["x"]).detach()).square().mean().backward();
        (critic->forward(batch["y"]) - 1).square().mean().backward();
        of_critic->step();
        of_generator->zero_grad();
        critic->forward(generator->forward(batch["x"])).square().mean().backward();
        of_generator->step();
      }
      session.report({}, state);
    }
  });
  EXPECT_EQ(code, 0) << text_of(result);
  world().barrier();
  EXPECT_EQ(saved_gradients(storage / "gan"), std::vector<std::string>());
}

TEST(Stop, GradientsOfAModelThatIsNotPreparedAreWarnedOf) {
  const auto storage = test::shared_folder();
  for (const int every : {1, 2}) {
    const auto name = "every_" + std::to_string(every);
    const auto [code, result] =
        run({storage, {"--log-level", "warn"}, with_line(name)}, [&](Session& session, const Config&) {
          torch::nn::Linear net(1, 1);
          torch::optim::SGD optimizer(net->parameters(), 0.1);
          auto state = session.state({{"own", net}});
          state.restore();
          int taken = 0;
          for ([[maybe_unused]] auto epoch : session.epochs(3)) {
            for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 10})) {
              torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
              if (++taken % every != 0) continue;
              optimizer.step();
              optimizer.zero_grad();
            }
            session.report({}, state);
          }
        });
    EXPECT_EQ(code, 0) << text_of(result);
    world().barrier();
    const auto log = detail::read_file(storage / name / "logs" / "rank_00000.log");
    EXPECT_EQ(log.find("saving own: its gradients have not been stepped with") != std::string::npos, every == 2) << log;
  }
}

TEST(Stop, SavedGradientsOfAModelThatIsGoneAreGivenToNoOther) {
  const auto bare = [] { return torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)); };
  detail::session::PreparedModels models;
  {
    const StateEntries entries{{"net", bare()}};
    models.restore_gradients(entries, {.gradients = {{"net/weight", torch::ones({1, 1})}}, .workers = world().size()},
                             world().size());
  }
  torch::nn::Sequential later;  // enough of them that one is likely to get the freed memory
  for (int i = 0; i < 64; ++i) later->push_back(bare());
  models.add(test::Preparation()(later.ptr()));
  for (const auto& parameter : later->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST_P(Steps, AreNotWaitedForAtReportsThatNeverComeRightAfterOne) {
  const auto storage = test::shared_folder();
  bool asked = false;
  int batches = 0;
  const auto [code, result] = run_until(asked, {storage, {}, with_line("asked")}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(layers(2));
    auto optimizer = sgd(session, GetParam(), net->parameters());
    auto state = session.state({{"net", net}, {"optimizer", *optimizer}});
    while (++batches < 100) {
      if (batches == 5) asked = true;
      torch::mse_loss(net->forward(torch::ones({2, 1})), torch::ones({2, 1})).backward();
      if (batches % 4 == 2) session.report({{"batches", batches}}, state);
      if (batches % 4 != 0) continue;
      optimizer->step();
      optimizer->zero_grad();
    }
  });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(batches, 6) << "at the first report after the wish";
}

TEST_P(PreparedSteps, WaitsForThatOfSeveralOptimizersWhichAddsUp) {
  const auto make = [](Session& session) -> Program {
    auto net = session.prepare_model(layers(3));
    auto first = sgd(session, GetParam(), net[0]->parameters()), other = sgd(session, GetParam(), net[1]->parameters());
    const auto train = [=](Batch& batch, int number) mutable {
      first->zero_grad();
      if (number % 3 == 1) other->zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      first->step();
      if (number % 3 == 0) other->step();
    };
    return {{{"net", net}, {"first", *first}, {"other", *other}}, train};
  };
  EXPECT_EQ(batches_until_it_stops(4, make), 6);
}

TEST_P(PreparedSteps, ThatChangeNothingAreSeen) {
  const auto make = [](Session& session) -> Program {
    auto net = session.prepare_model(layers(3));
    auto optimizer = sgd(session, GetParam(), net->parameters(), 0);
    const auto train = [=](Batch& batch, int) mutable {
      optimizer->zero_grad();
      torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
      optimizer->step();
    };
    return {{{"net", net}, {"optimizer", *optimizer}}, train};
  };
  EXPECT_EQ(batches_until_it_stops(5, make), 5);
}

/// When the newest checkpoint was complete. What follows takes longer on a busy machine, and nothing can be lost then.
std::filesystem::file_time_type time_of_newest(const std::filesystem::path& run) {
  return std::filesystem::last_write_time(list_checkpoints(run).back().path / "manifest.json");
}

TEST(Stop, WaitsForNoStepLongerThanThereIsTime) {
  const auto storage = test::shared_folder();
  const auto begin = std::filesystem::file_time_type::clock::now();
  const auto [code, result] =
      run({storage, {"--time-limit", "3"}, with_line("unstepped")}, [](Session& session, const Config&) {
        auto net = session.prepare_model(torch::nn::Linear(1, 1));
        auto state = session.state({{"net", net}});
        state.restore();
        for ([[maybe_unused]] auto epoch : session.epochs(10))
          for (auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8})) {
            torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }
      });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "unstepped"), 1u);
  EXPECT_EQ(saved_gradients(storage / "unstepped").size(), 2u);
  EXPECT_LT(time_of_newest(storage / "unstepped") - begin, std::chrono::seconds(4));
}

TEST(Stop, AFileInTheRunsFolderAsksForIt) {
  const auto storage = test::shared_folder();
  const auto file = storage / "file" / "stop";
  Fit fit;
  const auto train = [&](Session& session, const Config&) {
    fit_line(session, fit, 1, false, [&](std::int64_t step) {
      if (step != 7 || session.world_rank() != 0) return;
      std::ofstream(file) << "";
      std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // it is looked for once a second
    });
  };
  const auto [code, result] = run({storage, {}, with_line("file")}, train);
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "file"), 1u);
  EXPECT_EQ(text_of(result).find("training: stopped as the file stop is there, state saved"), 0u) << text_of(result);
  EXPECT_FALSE(std::filesystem::exists(file));
  expect_same_everywhere(fit.steps);
  EXPECT_EQ(
      run({storage, {}, with_line("file")}, [&](Session& session, const Config&) { fit_line(session, fit); }).first, 0)
      << "it stops one start";
  EXPECT_EQ(fit.steps, 18);
}

TEST(Stop, AFileThatCameTooLateStopsNoOther) {
  const auto storage = test::shared_folder();
  const auto file = storage / "late" / "stop";
  const auto train = [&](Session& session, const Config&) {
    if (session.world_rank() == 0) std::ofstream(file) << "";
  };
  EXPECT_EQ(run({storage, {}, with_line("late")}, train).first, 0);
  EXPECT_FALSE(std::filesystem::exists(file));
}

/// Saves take 300 ms.
void fit_slowly(Session& session, const Config&) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  const StateEntry slow(
      [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        return StateDict{.values = 1};
      },
      [](const StateDict&) {});
  auto state = session.state({{"model", net}, {"slow", slow}});
  state.restore();
  for (auto epoch : session.epochs(1'000'000'000)) {
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
    }
    if (epoch == 0) session.report({{"epoch", epoch}}, state);
  }
}

TEST(Stop, TheTimeIsOverWhenAllIsSaved) {
  const auto storage = test::shared_folder();
  const auto begin = std::filesystem::file_time_type::clock::now();
  const auto [code, result] = run({storage, {"--time-limit", "4"}, with_line("limit")}, fit_slowly);
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "limit"), 2u);
  EXPECT_EQ(text_of(result).find("training: stopped as the time limit of 4 s ends, state saved in checkpoint_"), 0u)
      << text_of(result);
  EXPECT_LT(time_of_newest(storage / "limit") - begin, std::chrono::seconds(4));
}

TEST(Stop, TheAllocationOfSlurmIsALimit) {
  const auto storage = test::shared_folder();
  const auto end = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()) + 5;
  ::setenv("SLURM_JOB_END_TIME", std::to_string(end).c_str(), 1);
  const auto [code, result] = run({storage, {}, with_line("allocation")}, fit_slowly);
  ::unsetenv("SLURM_JOB_END_TIME");
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "allocation"), 2u);
  char clock[8] = "";
  std::strftime(clock, sizeof clock, "%H:%M", std::localtime(&end));
  EXPECT_EQ(text_of(result).find("training: stopped as the batch job ends at " + std::string(clock) + ", state saved"),
            0u)
      << text_of(result);
}

TEST(Stop, WithoutAStateSavesNothingAndIsNotTriedAgain) {
  const auto storage = test::shared_folder();
  auto options = with_line("none");
  options.run_config.failure_config.max_failures = 3;
  int attempts = 0;
  const auto [code, result] = run({storage, at_once, options}, [&](Session& session, const Config&) {
    ++attempts;
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    for (std::int64_t epoch = 0; epoch < 1'000'000; ++epoch)
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4}))
        torch::mse_loss(net->forward(batch["x"]), batch["y"]).backward();
  });
  EXPECT_EQ(code, 75) << text_of(result);
  EXPECT_EQ(attempts, 1);
  EXPECT_EQ(saved(storage / "none"), 0u);
  EXPECT_EQ(text_of(result).find("training: stopped as the time limit of 0 s ends, and there is no State to save"), 0u)
      << text_of(result);
}

TEST(Stop, EndsThePauseBeforeTheNextAttempt) {
  const auto storage = test::shared_folder();
  auto options = with_line("pause");
  int attempts = 0;
  const auto fail = [&](Session&, const Config&) {
    ++attempts;
    throw std::runtime_error("before the first batch");
  };
  options.run_config.failure_config.max_failures = -1;
  const auto [code, result] = run({storage, at_once, options}, fail);
  EXPECT_EQ(code, 75) << text_of(result);
  EXPECT_NE(text_of(result).find("there is no checkpoint"), std::string::npos) << text_of(result);
  EXPECT_EQ(attempts, 1);

  // With a checkpoint there is something to go on from.
  std::string value = "saved";
  options.run_config.failure_config.max_failures = 0;
  run({storage, {}, options}, [&](Session& session, const Config&) {
    session.report({{"loss", 1}}, session.state({{"value", value}}));
    throw std::runtime_error("after a report");
  });
  options.run_config.failure_config.max_failures = -1;
  const auto [code_with_checkpoint, with_checkpoint] = run({storage, at_once, options}, fail);
  EXPECT_EQ(code_with_checkpoint, 85) << text_of(with_checkpoint);
  EXPECT_EQ(attempts, 2);
}

TEST(Stop, AStateThatIsGoneIsNotUsed) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, at_once, with_line("gone")}, [&](Session& session, const Config&) {
    {
      std::string value = "of a scope that has ended";
      auto state = session.state({{"value", value}});
      const auto copy = state;
      state.restore();
    }
    for (;;)
      for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
      }
  });
  EXPECT_EQ(code, 75) << text_of(result);
  EXPECT_EQ(saved(storage / "gone"), 0u);
}

TEST(Stop, WithoutAModelTheWorkersAskEachOther) {
  const auto storage = test::shared_folder();
  const auto [code, result] = test::launch({storage, {"--time-limit", "2"}}, [&](Launch& launch) {
    const auto train = [&](Session& session, const Config&) {
      std::int64_t steps = 0;
      auto original = std::make_unique<State>(session.state({{"steps", steps}}));
      const auto state = *original;  // a copy is the same State
      original->restore();
      original.reset();
      for ([[maybe_unused]] auto epoch : session.epochs(1'000'000'000))
        for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) ++steps;
    };
    return TorchTrainer(launch, train, with_line("alone")).fit();
  });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "alone"), 1u);
}

TEST(Stop, EndsAnEpochLoopWithoutData) {
  const auto storage = test::shared_folder();
  std::int64_t epochs = 0;
  auto options = with_line("epochs");
  const auto train = [&](std::int64_t count) {
    return [&, count](Session& session, const Config&) {
      auto state = session.state({{"epochs", epochs}});
      state.restore();
      for ([[maybe_unused]] auto epoch : session.epochs(count)) ++epochs;
    };
  };
  EXPECT_EQ(run({storage, at_once, options}, train(1'000'000'000)).first, 85);
  EXPECT_GE(epochs, 1);
  const auto stopped = epochs;
  epochs = 0;
  EXPECT_EQ(run({storage, {}, options}, train(stopped + 2)).first, 0);
  EXPECT_EQ(epochs, stopped + 2) << "each once";
}

TEST(Stop, IsHeededAtAReportThatSavesNothing) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, at_once, with_line("report")}, [&](Session& session, const Config&) {
    for (;;) session.report({{"a", 1}});
  });
  EXPECT_EQ(code, 75) << text_of(result);
  EXPECT_EQ(result->metrics_history.size(), 1u);
  const auto with_state = run({storage, at_once, with_line("state")}, [&](Session& session, const Config&) {
    double value = 1;
    auto state = session.state({{"value", value}});
    state.restore();
    for (;;) session.report({{"a", 1}});
  });
  EXPECT_EQ(with_state.first, 85) << text_of(with_state.second);
  EXPECT_EQ(saved(storage / "state"), 1u);
  const auto reported = run({storage, at_once, with_line("reported")}, [&](Session& session, const Config&) {
    double value = 1;
    for (;;) session.report({{"a", 1}}, session.state({{"value", value}}));
  });
  EXPECT_EQ(reported.first, 85);
  EXPECT_EQ(reported.second->metrics_history.size(), 1u);
}

TEST(Stop, AtAReportOfFilesAloneSavesTheState) {
  const auto storage = test::shared_folder();
  for (const std::string way : {"with a state", "without"}) {
    const bool has_state = way == "with a state";
    const auto train = [&](bool& asks) {
      return [&](Session& session, const Config&) {
        std::int64_t reports = 0;
        std::string file = "of the user";
        std::optional<State> state;
        if (has_state) {
          state = session.state({{"reports", reports}});
          state->restore();
        }
        asks = true;
        for (++reports;;) session.report({{"a", 1}}, Checkpoint::from_dict({{"file", file}}));
      };
    };
    for (int start = 1; start <= 2; ++start) {
      bool asks = false;
      const auto [code, result] = run_until(asks, {storage, {}, with_line(way)}, train(asks));
      EXPECT_EQ(code, 85) << text_of(result);
      EXPECT_EQ(saved(storage / way), static_cast<std::size_t>(has_state ? 2 * start : start));
      const auto newest = list_checkpoints(storage / way).back().path;
      const auto values = Checkpoint::from_directory(newest).to_dict().values;
      EXPECT_EQ(values.contains("reports"), has_state) << values;
      if (has_state) {
        EXPECT_EQ(values.at("reports"), start);
      }
    }
  }
}

TEST(Stop, AValidationPassIsNoPlaceForIt) {
  const auto storage = test::shared_folder();
  auto options = with_line("validation");
  options.datasets.emplace("test", line());
  options.dataset_config.split_all = true;
  std::int64_t samples = 0;
  EXPECT_EQ(run({storage, at_once, options},
                [&](Session& session, const Config&) {
                  auto net = session.prepare_model(torch::nn::Linear(1, 1));
                  auto state = session.state({{"model", net}});
                  state.restore();
                  auto test = session.get_dataset_shard("test");
                  for ([[maybe_unused]] auto epoch : session.epochs(2)) {
                    const auto evaluation = session.evaluation(net);
                    for (auto& batch : test.iter_torch_batches({.batch_size = 4})) samples += batch.size();
                  }
                })
                .first,
            85);
  EXPECT_EQ(world().all_reduce(samples), 46) << "one whole pass, then the next epoch";
}

TEST(Stop, WaitsForTheEndOfJoin) {
  const auto storage = test::shared_folder();
  int batches = 0;
  const auto [code, result] = run({storage, at_once, with_line("join")}, [&](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto state = session.state({{"model", net}, {"optimizer", optimizer}});
    state.restore();
    const auto x = torch::ones({2, 1});
    for ([[maybe_unused]] auto epoch : session.epochs(2)) {
      auto join = session.join();
      for (int i = 0; i < 3 + session.world_rank(); ++i) {
        optimizer.zero_grad();
        net->forward(x).sum().backward();
        optimizer.step();
        ++batches;
      }
    }
  });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(batches, 3 + world().rank());
}

TEST(Stop, AnExceptionOfOneWorkerWhileOthersObeyIsTheCause) {
  const int bad = world().size() - 1;
  const auto [code, result] =
      run({test::shared_folder(), at_once, with_line("throws")}, [&](Session& session, const Config&) {
        while (!session.should_stop()) {
        }
        if (session.world_rank() == bad) throw std::runtime_error("thrown while stopping");
      });
  EXPECT_EQ(code, 1);
  EXPECT_NE(text_of(result).find("thrown while stopping"), std::string::npos) << text_of(result);
}

TEST(Stop, EndsTheRunAlsoIfItIsCaught) {
  for (const std::string way : {"swallowed", "replaced", "held on to"}) {
    const auto storage = test::shared_folder();
    std::int64_t steps = 0;
    const auto train = [&](Session& session, const Config&) {
      auto state = session.state({{"steps", steps}});
      state.restore();
      const auto pass = [&] {
        for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.global_batch_size = 8}))
          ++steps;
      };
      try {
        for ([[maybe_unused]] auto epoch : session.epochs(3)) pass();
      } catch (const std::exception& stop) {
        const std::string text = stop.what();
        if (way == "replaced") throw std::runtime_error("training: " + text);
        if (way == "swallowed") return;
        int call = 0;
        for (const std::function<void()>& again : std::vector<std::function<void()>>{
                 [&] {
                   session.report({{"steps", steps}});
                 },
                 [&] {
                   session.report({{"steps", steps}}, state);
                 },
                 [&] { state.restore(); }, [&] { session.epochs(4); }, pass, [&] { session.should_stop(); },
                 [&] { session.preemption(); }, [&] { session.barrier(); }, [&] { session.mean(torch::ones({1})); },
                 [&] { session.prepare_model(torch::nn::Linear(1, 1)); }, [&] { session.broadcast_from_rank_zero(1); },
                 [&] { session.get_all_reported_checkpoints(); }}) {
          ++call;
          try {
            again();
            ADD_FAILURE() << "call " << call;
          } catch (const Error& error) {
            EXPECT_EQ(error.what(), text) << call;
          }
        }
      }
    };
    const auto [code, result] = run({storage, at_once, with_line("caught")}, train);
    EXPECT_EQ(code, 85) << way << ": " << text_of(result);
    EXPECT_EQ(text_of(result).find("training: stopped as the time limit of 0 s ends, state saved in"), 0u)
        << text_of(result);
    EXPECT_EQ(saved(storage / "caught"), 1u);
    EXPECT_EQ(run({storage, {}, with_line("caught")}, train).first, 0);
    EXPECT_EQ(steps, 18) << "the next start goes on";
  }
}

TEST(Stop, ThatIsCaughtWithoutAStateIsNotFinished) {
  const auto storage = test::shared_folder();
  auto options = with_line("none");
  options.run_config.failure_config.max_failures = 3;
  int attempts = 0;
  const auto [code, result] = run({storage, at_once, options}, [&](Session& session, const Config&) {
    ++attempts;
    try {
      for (;;) session.report({{"a", 1}});
    } catch (const std::exception&) {
    }
  });
  EXPECT_EQ(code, 75) << text_of(result);
  EXPECT_EQ(attempts, 1);
}

TEST(Stop, ThatCannotSaveIsNotFinishedIfItIsCaught) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, at_once, with_line("unsaved")}, [&](Session& session, const Config&) {
    const StateEntry broken([]() -> StateDict { throw std::runtime_error("broken"); }, [](const StateDict&) {});
    auto state = session.state({{"broken", broken}});
    state.restore();
    try {
      for ([[maybe_unused]] auto epoch : session.epochs(1'000'000'000)) {
      }
    } catch (const std::exception&) {
    }
  });
  EXPECT_EQ(code, 1);
  EXPECT_NE(text_of(result).find("broken"), std::string::npos) << text_of(result);
}

/// Passes that train nothing, until the run stops.
void pass_for_ever(Session& session) {
  for (;;)
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
    }
}

Json newest_values(const std::filesystem::path& run) {
  return Checkpoint::from_directory(list_checkpoints(run).back().path).to_dict().values;
}

TEST(Stop, SavesNoStateThatWasRefused) {
  const auto storage = test::shared_folder();
  std::int64_t good = 1, other = 2;
  bool asked = false;
  const auto reported = run_until(asked, {storage, {}, with_line("refused")}, [&](Session& session, const Config&) {
    auto state = session.state({{"good", good}});
    session.report({{"a", 1}}, state);
    const StateEntry broken([]() -> StateDict { throw std::runtime_error("broken"); }, [](const StateDict&) {});
    auto refused = session.state({{"broken", broken}});
    EXPECT_THROW(session.report({{"a", 1}}, refused), Error);
    asked = true;
    pass_for_ever(session);
  });
  EXPECT_EQ(reported.first, 85) << text_of(reported.second);
  EXPECT_TRUE(newest_values(storage / "refused").contains("good"));
  asked = false;
  const auto restored = run_until(asked, {storage, {}, with_line("refused")}, [&](Session& session, const Config&) {
    auto state = session.state({{"good", good}}), refused = session.state({{"other", other}});
    EXPECT_TRUE(state.restore());
    EXPECT_THROW(refused.restore(), Error);
    asked = true;
    pass_for_ever(session);
  });
  EXPECT_EQ(restored.first, 85) << text_of(restored.second);
  EXPECT_EQ(saved(storage / "refused"), 3u);
  EXPECT_TRUE(newest_values(storage / "refused").contains("good"));
}

TEST(Stop, SavesTheLivingStateThoughLaterOnesAreGone) {
  const auto storage = test::shared_folder();
  std::int64_t number = 1, later = 2;
  bool asked = false;
  const auto [code, result] =
      run_until(asked, {storage, {}, with_line("living")}, [&](Session& session, const Config&) {
        auto state = session.state({{"number", number}});
        state.restore();
        std::optional<State> of_some = session.state({{"of_some", later}});
        session.report({{"a", 1}}, *of_some);
        if (session.world_rank() == session.world_size() - 1) of_some.reset();
        session.report({{"a", 1}}, session.state({{"temporary", later}}));
        asked = true;
        pass_for_ever(session);
      });
  EXPECT_EQ(code, 85) << text_of(result);
  EXPECT_EQ(saved(storage / "living"), 3u);
  EXPECT_TRUE(newest_values(storage / "living").contains("number")) << "it lives on all workers";
}

TEST(Stop, ALoopOfOnesOwnAsks) {
  const auto storage = test::shared_folder();
  const auto train = [](bool reports) {
    return [reports](Session& session, const Config&) {
      std::int64_t steps = 0;
      auto state = session.state({{"steps", steps}});
      state.restore();
      while (!session.should_stop()) ++steps;
      if (reports) session.report({{"steps", steps}}, state);
    };
  };
  EXPECT_EQ(run({storage, at_once, with_line("reports")}, train(true)).first, 85);
  EXPECT_EQ(saved(storage / "reports"), 1u);
  EXPECT_EQ(run({storage, at_once, with_line("returns")}, train(false)).first, 75) << "it is not finished";
  bool asked = true;
  EXPECT_EQ(
      run({storage, {}, with_line("returns")}, [&](Session& session, const Config&) { asked = session.should_stop(); })
          .first,
      0);
  EXPECT_FALSE(asked);
}

}  // namespace
}  // namespace muster::stop_test
