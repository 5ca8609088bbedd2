// Passes over datasets and loaders in whole runs: counts, weights, and where a stopped run goes on.
#include "base/file.hpp"
#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "step/batch_weight.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::data_passes_test {
namespace {

using test::run;
using test::world;
using Samples = std::vector<std::int64_t>;

/// Sample i is the number i.
Dataset numbers(std::int64_t n) { return Dataset::from_tensors({{"i", at::arange(n)}}); }

auto torch_numbers(std::int64_t n) {
  return torch::data::datasets::TensorDataset(at::arange(n))
      .map(torch::data::transforms::Stack<torch::data::TensorExample>());
}

Samples indices(std::int64_t n) {
  Samples samples(static_cast<std::size_t>(n));
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

/// The values of all ranks, in order. Collective.
Samples of_all(const Samples& mine) {
  Samples all;
  for (const auto& theirs : world().all_gather(Json(mine).dump()))
    for (const auto& sample : Json::parse(theirs)) all.push_back(sample);
  std::sort(all.begin(), all.end());
  return all;
}

void append(Samples& samples, const at::Tensor& values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) samples.push_back(values[i].item<std::int64_t>());
}

TorchTrainerOptions with(std::string name, std::map<std::string, Dataset> datasets, bool split_all = true) {
  return {.dataset_config = {.split_all = split_all},
          .run_config = {.name = std::move(name)},
          .datasets = std::move(datasets)};
}

/// The reports of checkpoints with which a run ends that will be continued.
struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stopped here") {}
};

std::string error_of(const std::optional<Result>& result) {
  return result && result->error ? result->error->what() : std::string();
}

TEST(Passes, CountingBatchesTakesNone) {
  const auto storage = test::shared_folder();
  Samples samples;
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {}, with("count", {{"train", numbers(40)}})}, [&](Session& session, const Config&) {
          const BatchOptions options{.global_batch_size = 4, .shuffle = true};
          auto shard = session.get_dataset_shard();
          EXPECT_EQ(shard.iter_torch_batches(options).num_batches(), 10);
          std::int64_t steps = 0;
          auto state = session.state({{"steps", steps}});
          EXPECT_EQ(state.restore(), again);
          auto waiting = shard.iter_torch_batches(options);
          EXPECT_EQ(shard.iter_torch_batches(options).num_batches(), 10) << "outside the loop nothing goes on";
          for ([[maybe_unused]] auto epoch : session.epochs(1)) {
            EXPECT_EQ(shard.iter_torch_batches(options).num_batches(), again ? 7 : 10);
            for (auto& batch : shard.iter_torch_batches(options)) {
              append(samples, batch["i"], batch.size());
              EXPECT_EQ(session.global_step(), ++steps);
              if (again || steps != 3) continue;
              session.report({}, state);
              throw Stop();
            }
          }
          EXPECT_EQ(steps, 10);
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  EXPECT_EQ(of_all(samples), indices(40)) << "each sample once";
}

enum class Loop { whole, from_where_it_was, says_so };

TEST(Passes, OfAnEpochThatNobodyCountsDoNotGetLost) {
  const auto storage = test::shared_folder();
  for (const auto loop : {Loop::whole, Loop::from_where_it_was, Loop::says_so}) {
    const auto name = "loop_" + std::to_string(static_cast<int>(loop));
    Samples samples;
    for (const bool again : {false, true}) {
      const auto [code, result] =
          run({storage, {}, with(name, {{"train", numbers(12)}})}, [&](Session& session, const Config&) {
            auto shard = session.get_dataset_shard();
            std::int64_t epoch = 0;
            auto state = session.state({{"epoch", epoch}});
            EXPECT_EQ(state.restore(), again);
            if (loop == Loop::whole) epoch = 0;
            for (; epoch < 4; ++epoch) {
              if (loop == Loop::says_so) shard.set_epoch(epoch);
              std::int64_t steps = 0;
              for (auto& batch : shard.iter_torch_batches({.global_batch_size = 4})) {
                append(samples, batch["i"], batch.size());
                if (again || epoch != 2 || ++steps != 1) continue;
                session.report({}, state);
                throw Stop();
              }
            }
          });
      const bool lost = again && loop == Loop::from_where_it_was;
      EXPECT_EQ(code, again && !lost ? 0 : 1) << error_of(result);
      if (lost) {
        EXPECT_NE(error_of(result).find("Loop over session.epochs(n)"), std::string::npos) << error_of(result);
      }
    }
    if (loop == Loop::from_where_it_was) continue;
    Samples want;
    for (const auto i : indices(12)) want.insert(want.end(), 4, i);
    EXPECT_EQ(of_all(samples), want) << name << ": four passes, each sample once in each";
  }
}

TEST(Passes, ARunThatEndsWithoutAnotherOneIsDone) {
  const auto storage = test::shared_folder();
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {}, with("steps", {{"train", numbers(12)}})}, [&](Session& session, const Config&) {
          auto shard = session.get_dataset_shard();
          auto state = session.state({});
          EXPECT_EQ(state.restore(), again);
          while (session.global_step() < 2)
            for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.global_batch_size = 4}))
              if (session.global_step() == 2) {
                session.report({}, state);  // in the middle of a pass
                throw Stop();
              }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
}

/// What a program does outside its loop over session.epochs(), on the first start and on a later one.
enum class Aside { before_restore, after_restore, on_a_fresh_start, peeks, after_the_loop };

TEST(Passes, OutsideTheEpochLoopTakeNothingOfIt) {
  const auto storage = test::shared_folder();
  for (const auto aside :
       {Aside::before_restore, Aside::after_restore, Aside::on_a_fresh_start, Aside::peeks, Aside::after_the_loop})
    for (const std::int64_t stops_in : {0, 1}) {
      const auto name = "aside_" + std::to_string(static_cast<int>(aside)) + std::to_string(stops_in);
      std::map<std::int64_t, Samples> samples;
      for (const bool again : {false, true}) {
        const auto [code, result] =
            run({storage, {}, with(name, {{"train", numbers(24)}})}, [&](Session& session, const Config&) {
              auto shard = session.get_dataset_shard();
              const auto look = [&](bool whole) {
                std::int64_t count = 0;
                for (auto& batch : shard.iter_torch_batches({.global_batch_size = 6})) {
                  count += batch.global_size();
                  if (!whole) break;
                }
                EXPECT_EQ(count, whole ? 24 : 6) << name;
              };
              auto state = session.state({});
              if (aside == Aside::before_restore) look(true);
              EXPECT_EQ(state.restore(), again);
              if (aside == Aside::after_restore || (aside == Aside::on_a_fresh_start && !again)) look(true);
              std::optional<BatchRange> peek;
              if (aside == Aside::peeks) {
                peek.emplace(shard.iter_torch_batches({.batch_size = 1}));
                peek->begin();
              }
              for (const auto epoch : session.epochs(2)) {
                std::int64_t steps = 0;
                for (auto& batch : shard.iter_torch_batches({.global_batch_size = 4, .shuffle = true})) {
                  append(samples[epoch], batch["i"], batch.size());
                  if (again || epoch != stops_in || ++steps != 2) continue;
                  session.report({}, state);
                  throw Stop();
                }
                session.report({}, state);
              }
              if (aside == Aside::after_the_loop) look(true);
            });
        EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
      }
      for (const std::int64_t epoch : {0, 1})
        EXPECT_EQ(of_all(samples[epoch]), indices(24)) << name << ", epoch " << epoch;
    }
}

TEST(Passes, AfterTheEpochLoopGoOnInTheMiddle) {
  const auto storage = test::shared_folder();
  Samples samples, after;
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {}, with("after", {{"train", numbers(24)}})}, [&](Session& session, const Config&) {
          auto shard = session.get_dataset_shard();
          auto state = session.state({});
          EXPECT_EQ(state.restore(), again);
          for ([[maybe_unused]] const auto epoch : session.epochs(2)) {
            for (auto& batch : shard.iter_torch_batches({.global_batch_size = 4}))
              append(samples, batch["i"], batch.size());
            session.report({}, state);
          }
          std::int64_t steps = 0;
          for (auto& batch : shard.iter_torch_batches({.global_batch_size = 4, .shuffle = true})) {
            append(after, batch["i"], batch.size());
            if (again || ++steps != 4) continue;
            session.report({}, state);
            throw Stop();
          }
          if (again) {
            EXPECT_EQ(steps, 0);
          }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  EXPECT_EQ(of_all(after), indices(24));
  EXPECT_EQ(of_all(samples).size(), 48u);
}

TEST(Passes, AStateReportedBeforeTheEpochLoopEndsNoEpoch) {
  const auto storage = test::shared_folder();
  for (const std::string before : {"nothing", "a_pass", "own_data"}) {
    std::vector<std::int64_t> epochs;
    for (const bool again : {false, true}) {
      const auto [code, result] =
          run({storage, {}, with(before, {{"train", numbers(24)}})}, [&](Session& session, const Config&) {
            auto net = session.prepare_model(torch::nn::Linear(1, 1));
            auto state = session.state({});
            if (before == "own_data") session.get_dataset_shard();
            const auto pass = [&] {
              for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches()) continue;
            };
            if (!state.restore()) {
              if (before == "a_pass") pass();
              if (before == "own_data") net->forward(at::ones({1, 1})).sum().backward();
              session.report({}, state);
              throw Stop();
            }
            for (const auto epoch : session.epochs(2)) {
              pass();
              epochs.push_back(epoch);
            }
          });
      EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
    }
    EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 1})) << before;
  }
}

TEST(Passes, AnEpochThatEndsBeforeThePassThatWasSavedIsAnError) {
  const auto storage = test::shared_folder();
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {}, with("fewer", {{"train", numbers(24)}})}, [&](Session& session, const Config&) {
          auto shard = session.get_dataset_shard();
          auto state = session.state({});
          EXPECT_EQ(state.restore(), again);
          for ([[maybe_unused]] const auto epoch : session.epochs(2)) {
            if (!again)
              for ([[maybe_unused]] auto& batch : shard.iter_torch_batches()) continue;
            for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.global_batch_size = 4})) {
              if (again) continue;
              session.report({}, state);
              throw Stop();
            }
          }
        });
    EXPECT_EQ(code, 1) << error_of(result);
    if (!again) continue;
    for (const char* part : {"\"train\"", "epoch 0", "at every start"})
      EXPECT_NE(error_of(result).find(part), std::string::npos) << error_of(result);
  }
}

TEST(Passes, OfAnEpochThatWasSavedBetweenThemAreAllTaken) {
  const auto storage = test::shared_folder();
  const std::map<std::string, Dataset> datasets{{"train", numbers(12)}, {"more", numbers(8)}};
  // Where the first start ends: in the first epoch's second pass, or before that of the second epoch.
  for (const std::string name : {"first_epoch", "second_epoch", "own_loop"}) {
    Samples train, more;
    for (const bool again : {false, true}) {
      const auto [code, result] = run({storage, {}, with(name, datasets)}, [&](Session& session, const Config&) {
        std::int64_t epoch = 0;
        auto state = session.state({{"epoch", epoch}});
        EXPECT_EQ(state.restore(), again);
        const auto passes = [&] {
          for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.global_batch_size = 4}))
            append(train, batch["i"], batch.size());
          session.report({}, state);
          if (!again && name != "first_epoch" && epoch == 1) throw Stop();
          for (auto& batch : session.get_dataset_shard("more").iter_torch_batches({.global_batch_size = 4})) {
            if (!again && name == "first_epoch") throw Stop();
            append(more, batch["i"], batch.size());
          }
        };
        if (name != "own_loop") {
          for (const auto counted : session.epochs(3)) epoch = counted, passes();
          return;
        }
        while (epoch < 3) {
          session.get_dataset_shard("train").set_epoch(epoch);
          passes();
          ++epoch;
          session.report({}, state);
        }
      });
      EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
      world().barrier();
    }
    const auto three_times = [](const Samples& once) {
      Samples samples;
      for (const auto i : once) samples.insert(samples.end(), 3, i);
      return samples;
    };
    EXPECT_EQ(of_all(train), three_times(indices(12))) << name;
    EXPECT_EQ(of_all(more), three_times(indices(8))) << name;
  }
}

TEST(Passes, WithOneReportAnEpochOfSeveralPassesIsOver) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> epochs;
  // The first epoch has a pass after its State; those after it have none.
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {}, with("fewer", {{"train", numbers(12)}})}, [&](Session& session, const Config&) {
          auto state = session.state({});
          EXPECT_EQ(state.restore(), again);
          for (const auto epoch : session.epochs(4)) {
            epochs.push_back(epoch);
            const auto pass = [&] {
              for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches()) continue;
            };
            pass();
            session.report({}, state);
            if (epoch == 0) pass();
            if (!again && epoch == 2) throw Stop();
          }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 1, 2, 3})) << "each once";
}

TEST(Passes, TwoOverOneShardAtOnceHaveNoPosition) {
  const auto storage = test::shared_folder();
  const BatchOptions options{.global_batch_size = 4, .shuffle = true};
  const auto refused = [&](const std::string& name, const std::function<void(Session&, DatasetShard&, State&)>& epoch) {
    const auto [code, result] =
        run({storage, {}, with(name, {{"train", numbers(24)}})}, [&](Session& session, const Config&) {
          auto shard = session.get_dataset_shard();
          auto state = session.state({});
          state.restore();
          for ([[maybe_unused]] const auto e : session.epochs(2)) {
            epoch(session, shard, state);
            session.report({}, state);
          }
        });
    const auto text = error_of(result);
    EXPECT_EQ(code, text.empty() ? 0 : 64) << text;
    return text;
  };
  for (const std::int64_t reports_at : {0, 1, 3}) {
    const auto zip =
        refused("zip" + std::to_string(reports_at), [&](Session& session, DatasetShard& shard, State& state) {
          auto as = shard.iter_torch_batches(options), bs = shard.iter_torch_batches(options);
          auto a = as.begin(), b = bs.begin();
          for (std::int64_t steps = 0; a != as.end() && b != bs.end(); ++a, ++b)
            if (++steps == reports_at) session.report({}, state);
        });
    const auto inside =
        refused("inside" + std::to_string(reports_at), [&](Session& session, DatasetShard& shard, State& state) {
          std::int64_t steps = 0;
          for ([[maybe_unused]] auto& outer : shard.iter_torch_batches(options)) {
            for ([[maybe_unused]] auto& inner : shard.iter_torch_batches(options)) break;
            if (++steps == reports_at) session.report({}, state);
          }
        });
    for (const auto& text : {zip, inside})
      if (reports_at == 0) {
        EXPECT_EQ(text, "");
      } else {
        for (const char* part : {"\"train\"", "second name", ".training = false"})
          EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
      }
  }
}

TEST(Passes, AStopWaitsWhileTwoOverOneShardAreUnderWay) {
  const auto storage = test::shared_folder();
  std::int64_t epochs = 0, steps = 0;
  const auto [code, result] =
      run({storage, {"--time-limit", "0"}, with("stopped", {{"train", numbers(24)}})},
          [&](Session& session, const Config&) {
            auto shard = session.get_dataset_shard();
            auto state = session.state({});
            state.restore();
            for ([[maybe_unused]] const auto epoch : session.epochs(2)) {
              ++epochs;
              for ([[maybe_unused]] auto& outer : shard.iter_torch_batches({.global_batch_size = 6})) {
                ++steps;
                for ([[maybe_unused]] auto& inner : shard.iter_torch_batches({.global_batch_size = 4})) continue;
              }
            }
          });
  EXPECT_EQ(code, 85) << error_of(result);
  EXPECT_EQ(epochs, 1);
  EXPECT_EQ(steps, 4) << "the whole epoch";
}

TEST(Passes, OverWholeDataHaveNoPlaceForAState) {
  const auto storage = test::shared_folder();
  const auto stream = Dataset::from_stream([](const StreamShard&) {
    return [i = 0]() mutable -> std::optional<StreamRows> {
      if (i == 12) return {};
      return Json{{"i", i++}};
    };
  });
  enum class Way { inside, after, evaluating, beside_split };
  for (const bool streams : {false, true})
    for (const auto way : {Way::inside, Way::after, Way::evaluating, Way::beside_split}) {
      const auto name = "whole" + std::to_string(static_cast<int>(way)) + (streams ? "s" : "");
      auto options = with(name, {{"train", streams ? stream : numbers(12)}, {"split", numbers(12)}}, false);
      options.dataset_config = {.datasets_to_split = std::vector<std::string>{"split"}};
      const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
        auto state = session.state({});
        auto peek = session.get_dataset_shard().iter_torch_batches({.batch_size = 1});
        peek.begin();
        for ([[maybe_unused]] const auto epoch : session.epochs(1)) {
          std::optional<BatchRange> split;
          if (way == Way::beside_split) {
            split.emplace(session.get_dataset_shard("split").iter_torch_batches({.batch_size = 1}));
            split->begin();
          }
          const torch::AutoGradMode mode(way != Way::evaluating);
          for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4}))
            if (way != Way::after) session.report({}, state);
          session.report({}, state);
        }
      });
      EXPECT_EQ(code, way == Way::inside ? 64 : 0) << name << ": " << error_of(result);
      if (way != Way::inside) continue;
      for (const char* part : {"\"train\"", "whole on each worker", "after the pass"})
        EXPECT_NE(error_of(result).find(part), std::string::npos) << part << " in: " << error_of(result);
    }
}

/// A program over data that muster does not know: returns the epoch of each step, over two starts.
std::vector<std::int64_t> own_data(const std::filesystem::path& storage, const std::string& name, int reports,
                                   std::int64_t stops_at, bool state_alone) {
  std::vector<std::int64_t> epochs;
  for (const bool again : {false, true}) {
    const auto [code, result] =
        run({storage, {"--log-level", "warn"}, with(name, {})}, [&](Session& session, const Config&) {
          auto net = session.prepare_model(torch::nn::Linear(1, 1));
          std::int64_t reported = 0;
          auto state = session.state({{"model", net}});
          EXPECT_EQ(state.restore(), again);
          for (const auto epoch : session.epochs(3)) {
            for (int part = 0; part < reports; ++part) {
              net->forward(at::ones({1, 1})).sum().backward();
              epochs.push_back(epoch);
              if (!state_alone) session.report({{"a", 1}});
              if (state_alone || part + 1 == reports)
                session.report({{"a", 2}}, state), session.report({{"a", 3}}, state);
              if (!again && ++reported == stops_at) throw Stop();
            }
          }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  return epochs;
}

TEST(Passes, OverOwnDataAreOverWithTheOnlyReportOfAnEpoch) {
  const auto storage = test::shared_folder();
  using Epochs = std::vector<std::int64_t>;
  const auto log_of = [&](const std::string& name) {
    return detail::read_file(storage / name / "logs" / "rank_00000.log");
  };
  const char* const warning = "several times in an epoch";
  EXPECT_EQ(own_data(storage, "once", 1, 2, true), (Epochs{0, 1, 2})) << "two reports without training between them";
  EXPECT_EQ(log_of("once").find(warning), std::string::npos);
  EXPECT_EQ(own_data(storage, "metrics", 2, 4, false), (Epochs{0, 0, 1, 1, 2, 2})) << "a State at the end";
  EXPECT_EQ(log_of("metrics").find(warning), std::string::npos);
  EXPECT_EQ(own_data(storage, "several", 3, 2, true), (Epochs{0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2})) << "nothing is lost";
  const auto log = log_of("several");
  EXPECT_NE(log.find(warning), std::string::npos) << log;
  EXPECT_EQ(own_data(storage, "later", 3, 4, true), (Epochs{0, 0, 0, 1, 1, 1, 1, 2, 2, 2})) << "known by then";
}

TEST(Passes, AnOwnLoopThatBeginsAgainAtItsFirstEpochIsWarnedOf) {
  const auto storage = test::shared_folder();
  for (const std::int64_t first : {0, 2}) {
    const auto name = "from_" + std::to_string(first);
    for (const bool again : {false, true}) {
      const auto [code, result] = run({storage, {"--log-level", "warn"}, with(name, {{"train", numbers(6)}})},
                                      [&](Session& session, const Config&) {
                                        auto shard = session.get_dataset_shard();
                                        auto state = session.state({});
                                        EXPECT_EQ(state.restore(), again);
                                        for (std::int64_t epoch = again ? first : 0; epoch < 4; ++epoch) {
                                          shard.set_epoch(epoch);
                                          for (auto& batch : shard.iter_torch_batches({.global_batch_size = 3})) {
                                            EXPECT_EQ(batch.global_size(), 3);
                                            if (again || epoch != 2) continue;
                                            session.report({}, state);
                                            throw Stop();
                                          }
                                        }
                                      });
      EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
    }
    const auto log = detail::read_file(storage / name / "logs" / "rank_00000.log");
    const auto said =
        log.find("setting epoch 0: the run goes on in epoch 2, and the epochs before it are trained again");
    EXPECT_EQ(said != std::string::npos, first == 0) << log;
  }
}

TEST(Passes, AStateAtTheTopOfAnEpochOfAnOwnLoopEndsNoEpoch) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> epochs;
  for (const bool again : {false, true}) {
    std::int64_t epoch = 0;
    const auto [code, result] =
        run({storage, {}, with("own_loop", {{"train", numbers(6)}})}, [&](Session& session, const Config&) {
          auto net = session.prepare_model(torch::nn::Linear(1, 1));
          auto state = session.state({{"model", net}, {"epoch", epoch}});
          EXPECT_EQ(state.restore(), again);
          auto shard = session.get_dataset_shard();
          for (; epoch < 3; ++epoch) {
            shard.set_epoch(epoch);
            session.report({}, state);
            if (!again && epoch == 1) throw Stop();
            for (auto& batch : shard.iter_torch_batches({.global_batch_size = 6})) {
              net->forward(batch["i"].to(at::kFloat).view({-1, 1})).sum().backward();
              epochs.push_back(epoch);
            }
          }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 1, 2}));
}

TEST(Passes, ANewSeedIsForTheNextPassAndNoneIsTheRunsOwn) {
  const auto storage = test::shared_folder();
  using Flags = std::vector<std::string>;
  // The orders of two epochs on this rank; stopped after the second batch of the first one, if flags for then are
  // given.
  const auto orders = [&](const std::string& name, const Flags& flags, const std::optional<Flags>& later) {
    std::vector<Samples> epochs(2);
    for (const bool again : {false, true}) {
      if (again && !later) break;
      const auto [code, result] = run({storage, again ? *later : flags, with(name, {{"train", numbers(60)}})},
                                      [&](Session& session, const Config&) {
                                        auto state = session.state({});
                                        EXPECT_EQ(state.restore(), again);
                                        for (const auto epoch : session.epochs(2)) {
                                          auto& samples = epochs[static_cast<std::size_t>(epoch)];
                                          for (auto& batch : session.get_dataset_shard().iter_torch_batches(
                                                   {.global_batch_size = 12, .shuffle = true})) {
                                            append(samples, batch["i"], batch.size());
                                            if (again || !later || session.global_step() != 2) continue;
                                            session.report({}, state);
                                            throw Stop();
                                          }
                                        }
                                      });
      EXPECT_EQ(code, again || !later ? 0 : 1) << error_of(result);
    }
    return epochs;
  };
  const auto seed_of = [&](const std::string& name) {
    return Json::parse(detail::read_file(storage / name / "params.json")).at("seed");
  };
  const auto of_5 = orders("5", {"--seed", "5"}, {}), of_6 = orders("6", {"--seed", "6"}, {});
  ASSERT_NE(of_5, of_6);
  EXPECT_EQ(orders("new", {"--seed", "5"}, Flags{"--seed", "6", "--log-level", "warn"}),
            (std::vector<Samples>{of_5[0], of_6[1]}));
  EXPECT_EQ(seed_of("new"), 6);
  const auto log = detail::read_file(storage / "new" / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("--seed differs from its value when the run was saved in the middle of a pass"),
            std::string::npos);
  EXPECT_EQ(orders("none", {"--seed", "5"}, Flags{}), of_5) << "a run keeps its seed";
  EXPECT_EQ(seed_of("none"), 5);
}

TEST(Passes, OverOwnDataAreOverBesideADatasetThatIsNotTrainedOver) {
  const auto storage = test::shared_folder();
  for (const bool at_the_top : {false, true}) {
    const std::string name = at_the_top ? "top" : "end";
    std::vector<std::int64_t> epochs;
    for (const bool again : {false, true}) {
      const auto options = with(name, {{"train", numbers(6)}, {"val", numbers(6)}});
      const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
        auto net = session.prepare_model(torch::nn::Linear(1, 1));
        auto state = session.state({{"model", net}});
        EXPECT_EQ(state.restore(), again);
        auto val = session.get_dataset_shard("val");
        for (const auto epoch : session.epochs(3)) {
          if (at_the_top) session.report({}, state);
          if (!again && epoch == 1) throw Stop();
          net->forward(at::ones({1, 1})).sum().backward();
          epochs.push_back(epoch);
          if (!at_the_top) session.report({}, state);
          if (epoch < 2) continue;
          const at::NoGradGuard no_gradients;
          for (auto& batch : val.iter_torch_batches({.batch_size = 2})) EXPECT_GE(batch.size(), 0);
        }
      });
      EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
    }
    EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 1, 2})) << name;
  }
}

TEST(Passes, OfAnotherOrderAfterARestartStillTakeEachSampleOnce) {
  const auto storage = test::shared_folder();
  const BatchOptions plain{.global_batch_size = 4}, shuffled{.global_batch_size = 4, .shuffle = true},
      locally{.global_batch_size = 4, .local_shuffle_buffer_size = 9},
      seeded{.global_batch_size = 4, .local_shuffle_buffer_size = 9, .local_shuffle_seed = 7};
  int number = 0;
  for (const auto& [before, after] : {std::pair(plain, shuffled),
                                      {shuffled, plain},
                                      {plain, locally},
                                      {locally, plain},
                                      {locally, seeded},
                                      {shuffled, locally}}) {
    const auto name = "order" + std::to_string(number++);
    Samples samples;
    for (const bool again : {false, true}) {
      const auto [code, result] =
          run({storage, {"--log-level", "warn"}, with(name, {{"train", numbers(30)}})},
              [&](Session& session, const Config&) {
                auto state = session.state({});
                EXPECT_EQ(state.restore(), again);
                for ([[maybe_unused]] const auto epoch : session.epochs(1))
                  for (auto& batch : session.get_dataset_shard().iter_torch_batches(again ? after : before)) {
                    append(samples, batch["i"], batch.size());
                    if (again || session.global_step() != 3) continue;
                    session.report({}, state);
                    throw Stop();
                  }
              });
      EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
    }
    EXPECT_EQ(of_all(samples), indices(30)) << name;
    const auto log = detail::read_file(storage / name / "logs" / "rank_00000.log");
    EXPECT_NE(log.find("keeps the order that it began with"), std::string::npos) << name << ": " << log;
  }
}

TEST(Passes, DataThatHaveAnotherNameAfterARestartAreNamed) {
  const auto storage = test::shared_folder();
  for (const bool again : {false, true}) {
    const std::string name = again ? "renamed" : "first_name";
    const auto [code, result] = run(
        {storage, {"--log-level", "warn"}, with("names", {{name, numbers(12)}})}, [&](Session& session, const Config&) {
          auto state = session.state({});
          EXPECT_EQ(state.restore(), again);
          for ([[maybe_unused]] const auto epoch : session.epochs(3))
            for ([[maybe_unused]] auto& batch :
                 session.get_dataset_shard(name).iter_torch_batches({.global_batch_size = 4})) {
              if (again) continue;
              session.report({}, state);
              throw Stop();
            }
        });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  }
  const auto log = detail::read_file(storage / "names" / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("\"first_name\""), std::string::npos) << log;
  EXPECT_EQ(log.find("names stay the same"), log.rfind("names stay the same")) << "once";
}

/// Trains an epoch and validates after every second step; returns the samples that each validation saw.
std::vector<std::int64_t> validating(const std::filesystem::path& storage, const std::string& name, bool gradients,
                                     bool again, Samples& samples) {
  std::vector<std::int64_t> seen;
  const auto validate = [&](Session& session) {
    const torch::AutoGradMode mode(gradients);
    std::int64_t count = 0;
    for (auto& batch : session.get_dataset_shard("val").iter_torch_batches({.batch_size = 2}))
      count += batch.global_size();
    seen.push_back(count);
  };
  const auto [code, result] = run(
      {storage, {}, with(name, {{"train", numbers(23)}, {"val", numbers(9)}})}, [&](Session& session, const Config&) {
        std::int64_t steps = 0;
        auto state = session.state({{"steps", steps}});
        EXPECT_EQ(state.restore(), again);
        for ([[maybe_unused]] auto epoch : session.epochs(2)) {
          if (!gradients) validate(session);  // before the pass that is stopped: it runs again, whole
          for (auto& batch :
               session.get_dataset_shard().iter_torch_batches({.global_batch_size = 4, .shuffle = true})) {
            append(samples, batch["i"], batch.size());
            if (++steps % 2 == 0) validate(session);
            if (again || steps != 4) continue;
            session.report({}, state);
            throw Stop();
          }
          session.report({}, state);
        }
        EXPECT_EQ(steps, 12);
        if (!gradients) {
          EXPECT_EQ(session.global_step(), steps) << "validation takes no steps";
        }
      });
  EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
  return seen;
}

TEST(Passes, ValidationInsideAnEpochIsWholeAfterAResume) {
  const auto storage = test::shared_folder();
  for (const bool gradients : {false, true}) {
    const std::string name = gradients ? "recording" : "evaluating";
    Samples samples;
    for (const bool again : {false, true})
      for (const auto count : validating(storage, name, gradients, again, samples)) EXPECT_EQ(count, 9) << name;
    auto want = indices(23);
    const auto twice = indices(23);
    want.insert(want.end(), twice.begin(), twice.end());
    std::sort(want.begin(), want.end());
    EXPECT_EQ(of_all(samples), want) << name;
  }
}

/// Adds random numbers of torch's own generator.
struct Noise : Preprocessor {
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override { batch.set("noise", at::rand({batch["i"].size(0), 2}, at::kDouble)); }
  Json state() const override { return nullptr; }
  void load_state(const Json&) override {}
};

/// The same with the generator that is passed to it.
struct GivenNoise : Noise {
  using Noise::transform;
  void transform(Batch& batch, at::Generator& generator) const override {
    batch.set("noise", at::rand({batch["i"].size(0), 2}, generator, at::kDouble));
  }
};

/// Its state has one key.
struct Keyed : Noise {
  explicit Keyed(std::string key) : key(std::move(key)) {}
  Json state() const override { return {{key, 1}}; }
  void load_state(const Json& state) override { EXPECT_EQ(state.at(key), 1); }
  std::string key;
};

TEST(Passes, APreprocessorWithAnotherStateIsRefusedOnResuming) {
  const auto storage = test::shared_folder();
  std::optional<Result> result;
  for (const char* key : {"mean", "mean", "median"}) {
    auto options = with("keyed", {{"train", numbers(8)}});
    options.preprocessor = std::make_shared<Keyed>(key);
    result = run({storage, {}, options}, [&](Session& session, const Config&) {
               session.report({}, session.state({}));
               throw Stop();
             }).second;
  }
  const auto text = error_of(result);
  EXPECT_NE(text.find("restoring the preprocessor: "), std::string::npos) << text;
  EXPECT_NE(text.find("median"), std::string::npos) << text;
}

TEST(Passes, APreprocessorThatTheRunDidNotHaveIsRefusedOnResuming) {
  const auto last_error = [](const std::vector<PreprocessorPtr>& preprocessors) {
    const auto storage = test::shared_folder();
    std::optional<Result> result;
    for (const auto& preprocessor : preprocessors) {
      auto options = with("other", {{"train", numbers(8)}});
      options.preprocessor = preprocessor;
      result = run({storage, {}, options}, [&](Session& session, const Config&) {
                 session.report({}, session.state({}));
                 throw Stop();
               }).second;
    }
    return error_of(result);
  };
  const auto noise = std::make_shared<Noise>();
  const auto given = last_error({nullptr, noise}), removed = last_error({noise, nullptr});
  EXPECT_NE(given.find("the checkpoint was saved without one"), std::string::npos) << given;
  EXPECT_NE(removed.find("the checkpoint was saved with one, and the trainer has none"), std::string::npos) << removed;
  EXPECT_EQ(last_error({noise, noise}).find("preprocessor"), std::string::npos);
}

/// The noise of each sample in each of two epochs, over all workers; stopped in the middle, and gone on with by
/// `later` workers, where they are not as many. The dataset or the preprocessor adds it. Collective.
std::set<std::string> noise_of(const std::filesystem::path& storage, const Dataset& train, const PreprocessorPtr& noise,
                               int workers, int later) {
  std::vector<std::string> seen;
  const auto name = "noise" + std::to_string(workers) + std::to_string(later);
  for (const int now : {workers, later}) {
    auto options = with(name, {{"train", train}});
    options.scaling_config = {.num_workers = now, .virtual_workers = 12};
    options.preprocessor = noise;
    const bool stops = now == workers && workers != later;
    const auto code =
        run({storage, {}, options}, [&](Session& session, const Config&) {
          auto state = session.state({});
          state.restore();
          for (const auto epoch : session.epochs(2))
            for (auto& batch :
                 session.get_dataset_shard().iter_torch_batches({.global_batch_size = 18, .shuffle = true})) {
              for (std::int64_t i = 0; i < batch.size(); ++i)
                seen.push_back(Json{epoch, batch["i"][i].item<std::int64_t>(), batch["noise"][i][0].item<double>(),
                                    batch["noise"][i][1].item<double>()}
                                   .dump());
              if (!stops || epoch == 0 || session.global_step() != 4 ||
                  step_weight_of(batch)->micro_batch + 1 < step_weight_of(batch)->micro_batches)
                continue;
              session.report({}, state);
              throw Stop();
            }
        }).first;
    EXPECT_EQ(code, stops ? 1 : 0);
    if (!stops) break;
  }
  std::set<std::string> all;
  for (const auto& theirs : world().all_gather(Json(seen).dump()))
    for (const auto& sample : Json::parse(theirs)) all.insert(sample.get<std::string>());
  return all;
}

/// The same for every number of workers, also if a run is continued by one less. Collective.
void expect_noise(const Dataset& train, const PreprocessorPtr& noise, const std::set<std::string>& want) {
  const auto storage = test::shared_folder();
  for (int workers = 1; workers <= world().size(); ++workers) {
    EXPECT_EQ(noise_of(storage, train, noise, workers, workers), want) << workers << " workers";
    if (workers > 1) {
      EXPECT_EQ(noise_of(storage, train, noise, workers, workers - 1), want) << workers << " workers, then one less";
    }
  }
}

/// Expects that no two samples have the same noise, in 2 epochs of 50 samples.
void expect_different(const std::set<std::string>& noise) {
  EXPECT_EQ(noise.size(), 100u);
  std::set<std::string> drawn;
  for (const auto& sample : noise) drawn.insert(Json::parse(sample)[2].dump());
  EXPECT_EQ(drawn.size(), 100u);
}

TEST(Passes, RandomNumbersOfAPreprocessorGoWithTheSamples) {
  const auto want = noise_of(test::shared_folder(), numbers(50), std::make_shared<GivenNoise>(), 1, 1);
  expect_different(want);
  const std::vector<PreprocessorPtr> ways{std::make_shared<GivenNoise>(), std::make_shared<Noise>(),
                                          chain({label_encoder("i"), std::make_shared<Noise>()})};
  for (const auto& noise : ways) expect_noise(numbers(50), noise, want);
  const auto mapped = numbers(50).map_batches(
      [](Batch& batch, at::Generator& generator) {
        batch.set("noise", at::rand({batch["i"].size(0), 2}, generator, at::kDouble));
      },
      {.threads = 3});
  expect_noise(mapped, nullptr, want);
}

TEST(Passes, AugmentationGoesWithTheSamples) {
  const auto stored =
      Dataset::from_tensors({{"i", at::arange(50)}, {"noise", at::arange(300, at::kDouble).view({50, 6})}});
  const auto augmentation =
      chain({random_crop({"noise"}, {2}, 1), random_flip({"noise"}), random_noise({"noise"}, 0.1)});
  const auto train = stored.transform(augmentation);
  const auto want = noise_of(test::shared_folder(), train, nullptr, 1, 1);
  expect_different(want);
  expect_noise(train, nullptr, want);
  expect_noise(stored.transform(augmentation, {.threads = 2}), nullptr, want);
}

TEST(Passes, AugmentationInACheckpointIsComparedOnResuming) {
  const auto storage = test::shared_folder();
  std::optional<Result> result;
  for (const double deviation : {0.5, 0.5, 0.25}) {
    auto options = with("augmented", {{"train", Dataset::from_tensors({{"x", at::ones({8, 2})}})}});
    options.preprocessor = chain({standard_scaler({"x"}), random_noise({"x"}, deviation)});
    result = run({storage, {}, options}, [&](Session& session, const Config&) {
               session.report({}, session.state({}));
               throw Stop();
             }).second;
    if (deviation == 0.5) {
      EXPECT_NE(error_of(result).find("stopped here"), std::string::npos) << error_of(result);
    }
  }
  const auto text = error_of(result);
  EXPECT_NE(text.find("\"deviation\":0.5}} was saved"), std::string::npos) << text;
}

/// What each rank draws between the steps of three epochs, of which the last two are resumed if `stops`. Collective.
std::vector<std::string> drawn_between_steps(const std::filesystem::path& storage, const std::string& name,
                                             bool stops) {
  std::vector<double> drawn;
  const int most = world().size() * 2;
  auto options = with(name, {{"train", numbers(4 * most)}});
  options.scaling_config = {.num_workers = world().size(), .virtual_workers = most};
  for (const bool again : {false, true}) {
    if (again && !stops) break;
    const auto code = run({storage, {}, options}, [&](Session& session, const Config&) {
                        auto state = session.state({});
                        state.restore();
                        for (const auto epoch : session.epochs(3)) {
                          if (stops && !again && epoch == 1) throw Stop();
                          drawn.push_back(at::rand({}, at::kDouble).item<double>());
                          for ([[maybe_unused]] auto& batch :
                               session.get_dataset_shard().iter_torch_batches({.global_batch_size = 2 * most}))
                            at::rand({3});
                          session.report({}, state);
                        }
                      }).first;
    EXPECT_EQ(code, stops && !again ? 1 : 0);
  }
  return world().all_gather(Json(drawn).dump());
}

TEST(Passes, TheRanksOwnRandomNumbersGoOnWithVirtualWorkers) {
  const auto storage = test::shared_folder();
  EXPECT_EQ(drawn_between_steps(storage, "stopped", true), drawn_between_steps(storage, "whole", false));
}

TEST(Passes, TwoOfDifferentPlansNeedAScope) {
  const auto [code, result] = run({test::shared_folder(), {}, with("two", {{"a", numbers(16)}, {"b", numbers(24)}})},
                                  [&](Session& session, const Config&) {
                                    auto net = session.prepare_model(torch::nn::Linear(1, 1));
                                    auto a = session.get_dataset_shard("a").iter_torch_batches({.batch_size = 2});
                                    auto b = session.get_dataset_shard("b").iter_torch_batches({.batch_size = 3});
                                    auto first = a.begin(), second = b.begin();
                                    (net->forward(first->begin()->second.to(at::kFloat).unsqueeze(1)).sum() +
                                     net->forward(second->begin()->second.to(at::kFloat).unsqueeze(1)).sum())
                                        .backward();
                                  });
  EXPECT_EQ(code, 64);
  const auto text = error_of(result);
  for (const char* part : {"\"a\"", "\"b\"", "session.step(batch)"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

/// The gradient of the mean over a step's samples. Collective.
double mean_of_step(const Batch& batch) {
  Samples mine;
  append(mine, batch["i"], batch.size());
  const auto all = of_all(mine);
  EXPECT_EQ(static_cast<std::int64_t>(all.size()), batch.global_size());
  return std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
}

TEST(Passes, AScopeSaysWhichBatchCounts) {
  const auto [code, result] =
      run({test::shared_folder(), {}, with("scopes", {{"a", numbers(11)}, {"b", numbers(7)}, {"c", numbers(11)}})},
          [&](Session& session, const Config&) {
            auto net = session.prepare_model(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)));
            const auto loss = [&](const Batch& batch) {
              return net->forward(batch["i"].to(at::kFloat).unsqueeze(1)).mean();
            };
            const auto expect = [&](double want, const char* what) {
              EXPECT_NEAR(net->weight.grad().item<double>(), want, 1e-5) << what;
              net->zero_grad();
            };
            std::optional<Batch> kept;
            {
              auto as = session.get_dataset_shard("a").iter_torch_batches({.batch_size = 2});
              auto bs = session.get_dataset_shard("b").iter_torch_batches({.global_batch_size = 3});
              auto a = as.begin(), b = bs.begin();
              for (; a != as.end() && b != bs.end(); ++a, ++b) {
                {
                  const auto scope = session.step(*a);
                  loss(*a).backward();
                }
                {
                  const auto scope = session.step(*b);
                  loss(*b).backward();
                }
                expect(mean_of_step(*a) + mean_of_step(*b), "a scope for each");
                kept = *b;
              }
            }
            {
              const auto scope = session.step(*kept);
              loss(*kept).backward();
            }
            expect(mean_of_step(*kept), "a batch that was kept");
            auto as = session.get_dataset_shard("a").iter_torch_batches({.batch_size = 2});
            auto cs = session.get_dataset_shard("c").iter_torch_batches({.batch_size = 2});
            auto a = as.begin(), c = cs.begin();
            for (; a != as.end(); ++a, ++c) {
              (loss(*a) + loss(*c)).backward();
              expect(mean_of_step(*a) + mean_of_step(*c), "alike, without a scope");
            }
          });
  EXPECT_EQ(code, 0) << error_of(result);
}

TEST(Passes, ASamplerOfOnesOwnIsReportedBetweenPasses) {
  const auto n = static_cast<std::size_t>(world().size());
  for (const bool inside : {true, false}) {
    const auto [code,
                result] = run({test::shared_folder(), {}, with("sampler", {})}, [&](Session& session, const Config&) {
      std::int64_t steps = 0;
      auto state = session.state({{"steps", steps}});
      auto loader = prepare_data_loader(
          session, torch_numbers(12), {.batch_size = 2},
          torch::data::samplers::DistributedSequentialSampler(12, n, static_cast<std::size_t>(session.world_rank())));
      for ([[maybe_unused]] auto& batch : *loader) {
        EXPECT_EQ(session.global_step(), ++steps);
        session.report({});
        if (inside) session.report({}, state);
      }
      session.report({}, state);
    });
    EXPECT_EQ(code, inside ? 64 : 0) << error_of(result);
    if (inside) {
      EXPECT_NE(error_of(result).find("\"train_loader\""), std::string::npos) << error_of(result);
    }
  }
}

TEST(Passes, ALoaderGoesOnInTheMiddleOfAnEpoch) {
  const auto storage = test::shared_folder();
  Samples samples;
  for (const bool again : {false, true}) {
    const auto [code, result] = run({storage, {}, with("loader", {})}, [&](Session& session, const Config&) {
      std::int64_t steps = 0;
      auto state = session.state({{"steps", steps}});
      const auto make = [&] {
        return prepare_data_loader(session, torch_numbers(23), {.global_batch_size = 4, .shuffle = true, .workers = 1});
      };
      auto loader = make();
      EXPECT_EQ(state.restore(), again);
      if (again) loader = make();  // before or after, it is the same
      for (auto epoch : session.epochs(2)) {
        loader->set_epoch(epoch);
        for (auto& batch : *loader) {
          append(samples, batch.data, loader->batch_samples());
          EXPECT_EQ(session.global_step(), ++steps);
          if (steps != 3 && steps != 8) continue;
          session.report({}, state);
          if (!again) throw Stop();
        }
        session.report({}, state);
      }
      EXPECT_EQ(steps, 12);
    });
    EXPECT_EQ(code, again ? 0 : 1) << error_of(result);
    ASSERT_TRUE(result);
    std::int64_t counted = 0;
    for (const auto& row : result->metrics_history) counted += row.at("num_samples").get<std::int64_t>();
    EXPECT_EQ(counted, again ? 46 : 12);
  }
  auto want = indices(23);
  const auto twice = indices(23);
  want.insert(want.end(), twice.begin(), twice.end());
  std::sort(want.begin(), want.end());
  EXPECT_EQ(of_all(samples), want);
}

TEST(Passes, AnotherNumberOfWorkersIsSaidBetweenEpochsToo) {
  if (world().size() == 1) GTEST_SKIP() << "needs two workers";
  const auto storage = test::shared_folder();
  for (const std::int64_t epochs : {1, 2}) {
    auto options = with("smaller", {{"train", numbers(24)}});
    options.scaling_config.num_workers = epochs == 1 ? world().size() : world().size() - 1;
    options.train_loop_config = {{"epochs", 0}};
    const auto [code, result] =
        run({storage, {"--set", "epochs=" + std::to_string(epochs), "--log-level", "warn"}, options},
            [&](Session& session, const Config& config) {
              std::int64_t steps = 0;
              auto state = session.state({{"steps", steps}});
              state.restore();
              for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
                for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2}))
                  steps += batch.size() >= 0;
                session.report({}, state);
              }
            });
    EXPECT_EQ(code, 0) << error_of(result);
  }
  const auto log = detail::read_file(storage / "smaller" / "logs" / "rank_00000.log");
  EXPECT_NE(log.find("a step now takes " + std::to_string(2 * (world().size() - 1)) + " samples"), std::string::npos)
      << "log: " << log;
  world().barrier();
}

TEST(Passes, TheLoopSetsTheEpoch) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("other", {{"train", numbers(12)}})}, [](Session& session, const Config&) {
        for (auto epoch : session.epochs(2)) session.get_dataset_shard().set_epoch(epoch + 1);
      });
  EXPECT_EQ(code, 64);
  EXPECT_NE(error_of(result).find("setting epoch 1: the loop over session.epochs() is in epoch 0"), std::string::npos)
      << error_of(result);
}

TEST(Passes, OverTheEndOfAnEpochHaveNoPosition) {
  const auto storage = test::shared_folder();
  const auto [code, result] =
      run({storage, {}, with("over_the_end", {{"train", numbers(96)}})}, [](Session& session, const Config&) {
        std::int64_t steps = 0;
        auto state = session.state({{"steps", steps}});
        auto range = session.get_dataset_shard().iter_torch_batches({.global_batch_size = 4});
        BatchRange::iterator batch;
        for (auto epoch : session.epochs(3)) {
          if (epoch == 0) batch = range.begin();
          for (int i = 0; i < 3; ++i) ++batch;
          if (epoch == 0) continue;
          session.report({{"without", epoch}});
          session.report({}, state);
        }
      });
  EXPECT_EQ(code, 64);
  EXPECT_NE(error_of(result).find("that began in an earlier epoch"), std::string::npos) << error_of(result);
  ASSERT_TRUE(result);
  EXPECT_EQ(result->metrics_history.size(), 1u);
}

TEST(Passes, ThatDoNotTrainComeInTheSameOrderAfterAStop) {
  const auto storage = test::shared_folder();
  using Orders = std::map<std::string, Samples>;
  const auto orders_of = [&](const std::string& name, bool split, std::int64_t stops_at) {
    Orders orders;
    std::int64_t steps = 0;
    const auto options = with(name, {{"train", numbers(24)}, {"other", numbers(9)}}, split);
    const auto [code, result] = run({storage, {}, options}, [&](Session& session, const Config&) {
      auto state = session.state({{"steps", steps}});
      state.restore();
      auto shard = session.get_dataset_shard();
      auto other = session.get_dataset_shard("other");
      const auto look = [&](const std::string& when, bool trains) {
        BatchOptions options{.global_batch_size = 6, .shuffle = true};
        options.training = trains;
        Samples samples;
        for (auto& batch : shard.iter_torch_batches(options)) append(samples, batch["i"], batch.size());
        orders[when] = samples;
        if (trains) return;
        samples.clear();
        for (auto& batch : other.iter_torch_batches(options)) append(samples, batch["i"], batch.size());
        orders["other " + when] = samples;
      };
      const auto train = [&](const std::string& when, std::int64_t global_batch) {
        for (auto& batch : shard.iter_torch_batches({.global_batch_size = global_batch, .shuffle = true})) {
          steps += batch.size() >= 0;
          if (steps % 3 != 1) look("inside " + when + " at step " + std::to_string(steps), false);
          if (steps != stops_at) continue;
          session.report({}, state);
          throw Stop();
        }
      };
      for (auto epoch : session.epochs(2)) {
        const auto of_epoch = " of epoch " + std::to_string(epoch);
        look("before" + of_epoch, false);
        look("before again" + of_epoch, false);
        train("the first pass" + of_epoch, 6);
        look("between" + of_epoch, false);
        train("the second pass" + of_epoch, 12);
        look("after" + of_epoch, false);
        session.report({}, state);
      }
      look("after the loop", false);
      look("at the end", true);
    });
    EXPECT_EQ(code, stops_at > 0 ? 1 : 0) << error_of(result);
    return orders;
  };
  for (const bool split : {true, false}) {
    const std::string kind = split ? "split" : "whole";
    const auto undisturbed = orders_of("undisturbed_" + kind, split, 0);
    for (const std::int64_t stops_at : {2, 5, 8, 9, 11}) {
      const auto name = kind + "_stopped_at_" + std::to_string(stops_at);
      auto orders = orders_of(name, split, stops_at);
      for (const auto& [when, samples] : orders_of(name, split, 0)) {
        // Samples that come again have the same values.
        const auto before = orders.find(when);
        EXPECT_TRUE(before == orders.end() || before->second == samples) << when << ", " << name;
        orders[when] = samples;
      }
      for (const auto& [when, samples] : undisturbed) EXPECT_EQ(orders[when], samples) << when << ", " << name;
    }
    for (const std::string data : {"", "other "})
      EXPECT_NE(undisturbed.at(data + "before of epoch 0"), undisturbed.at(data + "before again of epoch 0"));
  }
}

TEST(Passes, LeftAfterTheLastStateOfAnEpochAreAWarning) {
  const auto storage = test::shared_folder();
  for (const bool in_scope : {true, false}) {
    const auto name = in_scope ? "in_scope" : "open";
    auto options = with(name, {{"train", numbers(24)}});
    const auto [code, result] = run({storage, {"--log-level", "warn"}, options}, [&](Session& session, const Config&) {
      std::int64_t steps = 0;
      auto state = session.state({{"steps", steps}});
      for ([[maybe_unused]] auto epoch : session.epochs(2)) {
        std::optional<BatchRange> batches = session.get_dataset_shard().iter_torch_batches({.global_batch_size = 6});
        for (auto& batch : *batches) {
          steps += batch.size() >= 0;
          if (steps % 2 == 0) break;
        }
        if (in_scope) batches.reset();
        session.report({}, state);
      }
    });
    EXPECT_EQ(code, 0) << error_of(result);
    const auto log = detail::read_file(storage / name / "logs" / "rank_00000.log");
    EXPECT_EQ(log.find("was reported in the middle of a pass that the epoch then left") == std::string::npos, in_scope)
        << log;
    world().barrier();
  }
}

/// The text of the error with which a run over the dataset ends before training; `code` if it has none.
std::string refused(const std::filesystem::path& storage, const std::string& name, const Dataset& dataset, int code) {
  const auto storage_code = run({storage, {}, with(name, {{"train", dataset}})}, [](Session&, const Config&) {}).first;
  EXPECT_EQ(storage_code, code) << name;
  const auto path = storage / name / "logs" / "rank_00000.log";
  world().barrier();
  return detail::read_file(path);
}

TEST(Data, ThatDiffersByRankIsRefusedBeforeTraining) {
  if (world().size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto storage = test::shared_folder();
  const int bad = world().size() - 1;
  const bool mine = world().rank() == bad;
  const auto refuse = [&](const std::string& name, const Dataset& dataset, const std::vector<std::string>& parts) {
    const auto text = refused(storage, name, dataset, 65);
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
    EXPECT_NE(text.find("\"train\""), std::string::npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(bad) + " ("), std::string::npos) << text;
  };
  refuse("count", numbers(mine ? 30 : 26), {"26 samples", "30"});
  refuse("values", Dataset::from_tensors({{"i", at::arange(100) + (mine ? 1 : 0)}}), {"column \"i\"", "differ"});
  refuse("type", Dataset::from_tensors({{"i", at::arange(10, mine ? at::kInt : at::kLong)}}), {"i Int[]", "i Long[]"});
  const auto turned = at::arange(60).view({2, 30}).t();
  refuse("strided", Dataset::from_tensors({{"i", mine ? turned + 1 : turned}}), {"differ"});
  EXPECT_EQ(refused(storage, "same", Dataset::from_tensors({{"i", mine ? turned.clone() : turned}}), 0), "");
}

TEST(Data, OfCopiesOnNodesIsTheSameAndAStaleOneIsRefused) {
  if (world().size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto storage = test::shared_folder();
  const auto copy = storage / ("copy_" + std::to_string(world().rank()) + ".h5");
  const auto write = [&](bool stale, std::size_t rows) {
    std::filesystem::remove(copy);
    std::string text = "x,y\n";
    for (std::size_t row = 0; row < rows; ++row) text += "1," + std::to_string(stale ? row + 1 : row) + "\n";
    detail::write_file(storage / (copy.stem().string() + ".csv"), text);
    convert_csv({storage / (copy.stem().string() + ".csv")}, copy);
  };
  const int bad = world().size() - 1;
  const bool mine = world().rank() == bad;
  write(false, 500);
  EXPECT_EQ(refused(storage, "copies", copy, 0), "");
  if (mine) write(true, 500);
  EXPECT_NE(refused(storage, "stale", copy, 65).find("values of copy_0.h5"), std::string::npos);
  if (mine) write(false, 600);
  EXPECT_NE(refused(storage, "longer", copy, 65).find("600 on rank"), std::string::npos);
}

}  // namespace
}  // namespace muster::data_passes_test
