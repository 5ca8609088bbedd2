// Streams: rows without an index, dealt to the workers in whole runs.
#include "muster/muster.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::streams_test {
namespace {

using test::run;
using test::world;
using Samples = std::vector<std::int64_t>;

/// The rows of a worker: as many as `count` says, numbered worker × 1000 + i.
MakeStream numbered(std::function<std::int64_t(int worker)> count) {
  return [count](const StreamShard& shard) {
    return [left = count(shard.worker), next = std::int64_t{1000} * shard.worker]() mutable -> std::optional<Json> {
      if (left-- == 0) return {};
      return Json{{"i", next++}};
    };
  };
}

/// The values of all ranks, in order. Collective.
Samples of_all(const Samples& mine) {
  Samples all;
  for (const auto& theirs : world().all_gather(Json(mine).dump()))
    for (const auto& sample : Json::parse(theirs)) all.push_back(sample);
  std::sort(all.begin(), all.end());
  return all;
}

Samples rows_of(int workers, const std::function<std::int64_t(int)>& count) {
  Samples all;
  for (int w = 0; w < workers; ++w)
    for (std::int64_t i = 0; i < count(w); ++i) all.push_back(1000 * w + i);
  return all;
}

TorchTrainerOptions with(std::string name, Dataset train) {
  return {.run_config = {.name = std::move(name)}, .datasets = {{"train", std::move(train)}}};
}

/// What a pass hands out here: samples, and how many steps there are.
struct Taken {
  Samples samples;
  std::int64_t steps = 0, ghosts = 0;

  void take(const Batch& batch) {
    ++steps;
    ghosts += batch.size() == 0;
    EXPECT_GE(batch["i"].size(0), 1) << "somebody's row is there to compute on";
    for (std::int64_t i = 0; i < batch.size(); ++i) samples.push_back(batch["i"][i].item<std::int64_t>());
  }
};

TEST(Streams, EveryRowOnceAndAsManyStepsOnAllWorkers) {
  using Count = std::function<std::int64_t(int)>;
  const auto storage = test::shared_folder();
  const std::map<std::string, Count> streams{
      {"even", [](int) { return 10; }},
      {"uneven", [](int worker) { return 13 - 5 * worker; }},    // 13, 8, 3 and, of four, none
      {"late", [](int worker) { return worker == 0 ? 0 : 9; }},  // the first has none
      {"empty", [](int) { return 0; }}};
  for (const auto& [name, count] : streams) {
    const Count at_least_none = [count = count](int worker) { return std::max<std::int64_t>(0, count(worker)); };
    for (const int ahead : {0, 2}) {
      Taken taken;
      const auto code =
          run({storage, {}, with(name + std::to_string(ahead), Dataset::from_stream(numbered(at_least_none)))},
              [&](Session& session, const Config&) {
                for (auto& batch :
                     session.get_dataset_shard().iter_torch_batches({.batch_size = 4, .prefetch_batches = ahead}))
                  taken.take(batch);
              })
              .first;
      EXPECT_EQ(code, 0);
      EXPECT_EQ(of_all(taken.samples), rows_of(world().size(), at_least_none)) << name;
      std::int64_t most = 0;
      for (int w = 0; w < world().size(); ++w) most = std::max(most, (at_least_none(w) + 3) / 4);
      EXPECT_EQ(taken.steps, most) << name;
      EXPECT_EQ(taken.ghosts, most - (at_least_none(world().rank()) + 3) / 4) << name;
    }
  }
}

TEST(Streams, GradientsAreWeightedByTheSamples) {
  // The mean over the rows of a step, at any number of workers: as if one had them all.
  const auto count = [](int worker) { return 3 + 2 * worker; };
  double expected = 0;
  std::int64_t rows = 0;
  for (int w = 0; w < world().size(); ++w)
    for (std::int64_t i = 0; i < count(w); ++i, ++rows) expected += static_cast<double>(1000 * w + i);
  const auto [code, result] =
      run({test::shared_folder(), {}, with("weights", Dataset::from_stream(numbered(count)))},
          [&](Session& session, const Config&) {
            auto net = session.prepare_model(torch::nn::Linear(1, 1));
            std::int64_t steps = 0;
            for (auto& batch :
                 session.get_dataset_shard().iter_torch_batches({.batch_size = 16, .dtypes = {{"i", at::kFloat}}})) {
              net->zero_grad();
              net->forward(batch["i"].unsqueeze(1)).mean().backward();
              EXPECT_EQ(batch.global_size(), rows);
              EXPECT_NEAR(net->weight.grad().item<double>(), expected / static_cast<double>(rows), 1e-2);
              ++steps;
            }
            EXPECT_EQ(steps, 1);
            EXPECT_EQ(session.global_step(), 1);
            session.report({{"a", 1}});
          });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(result->metrics.at("num_samples"), rows);
}

TEST(Streams, BlocksAreCutAndPreprocessed) {
  // Blocks of 1, 2, 3 … rows, of which a batch takes parts.
  const auto blocks = [](const StreamShard& shard) {
    return [shard, size = std::int64_t{0}, next = std::int64_t{0}]() mutable -> std::optional<Batch> {
      if (++size > 5) return {};
      next += size;
      return Batch({{"i", 1000 * shard.worker + at::arange(next - size, next)}, {"two", at::full({size, 2}, 2.5)}});
    };
  };
  const auto scaler = min_max_scaler({"two"});
  scaler->fit(Dataset::from_tensors({{"two", at::tensor({0.0, 10.0}).view({2, 1}).repeat({1, 2})}}), world());
  auto options = with("blocks", Dataset::from_stream(blocks));
  options.preprocessor = scaler;
  Taken taken;
  std::set<std::int64_t> sizes;
  const auto code = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
                      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
                        taken.take(batch);
                        sizes.insert(batch.size());
                        EXPECT_TRUE(at::allclose(batch["two"], at::full_like(batch["two"], 0.25)));
                      }
                    }).first;
  EXPECT_EQ(code, 0);
  EXPECT_EQ(of_all(taken.samples), rows_of(world().size(), [](int) { return 15; }));
  EXPECT_EQ(sizes, (std::set<std::int64_t>{3, 4}));
}

TEST(Streams, DropLastAndGlobalBatch) {
  Taken taken, whole;
  const auto train = [&](Session& session, const Config&) {
    const auto shard = session.get_dataset_shard();
    for (auto& batch : shard.iter_batches({.batch_size = 4, .drop_last = true})) taken.take(batch);
    // One row more than they divide evenly: the first worker's.
    for (auto& batch : shard.iter_batches({.global_batch_size = 4 * session.world_size() + 1})) {
      if (whole.steps < 2) {
        EXPECT_EQ(batch.size(), session.world_rank() == 0 ? 5 : 4);
      }
      whole.take(batch);
    }
  };
  const auto ten = [](int) { return 10; };
  EXPECT_EQ(run({test::shared_folder(), {}, with("last", Dataset::from_stream(numbered(ten)))}, train).first, 0);
  EXPECT_EQ(taken.steps, 2);
  EXPECT_EQ(taken.samples.size(), 8u);
  EXPECT_EQ(of_all(whole.samples), rows_of(world().size(), ten));
}

TEST(Streams, AWholeOneIsWholeOnEachWorker) {
  auto options = with("whole", test::line());
  options.datasets.emplace("test", Dataset::from_stream(numbered([](int worker) { return worker == 0 ? 7 : 0; })));
  Samples samples;
  const auto code = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
                      // Not alike on all ranks, as nobody is waited for.
                      for (int pass = 0; pass <= world().rank(); ++pass)
                        for (auto& batch : session.get_dataset_shard("test").iter_batches({.batch_size = 2}))
                          for (std::int64_t i = 0; i < batch.size(); ++i)
                            samples.push_back(batch["i"][i].item<std::int64_t>());
                    }).first;
  EXPECT_EQ(code, 0);
  EXPECT_EQ(samples.size(), 7u * static_cast<std::size_t>(world().rank() + 1));
}

/// How a run of `loop` over that stream ends: its code and its error.
std::pair<int, std::string> end_of(MakeStream make, const std::function<void(Session&)>& loop,
                                   TorchTrainerOptions options = {}) {
  options.run_config.name = "end";
  options.datasets = {{"train", Dataset::from_stream(std::move(make))}};
  const auto [code, result] =
      run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) { loop(session); });
  return {code, result && result->error ? result->error->what() : ""};
}

void expect_error(const std::pair<int, std::string>& end, ExitCode code, const std::string& part) {
  EXPECT_EQ(end.first, static_cast<int>(code)) << end.second;
  EXPECT_NE(end.second.find(part), std::string::npos) << end.second;
}

void iterate(Session& session, const BatchOptions& options) {
  for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches(options)) continue;
}

TEST(Streams, OneWorkersExceptionSurfacesOnAll) {
  const auto last = world().size() - 1;
  const auto make = [&](const StreamShard& shard) {
    return [shard, last, rows = 0]() mutable -> std::optional<Json> {
      if (shard.worker == last && ++rows > 9) throw std::runtime_error("the tape is torn");
      return Json{{"i", 1}};  // without an end
    };
  };
  for (const int ahead : {0, 1})
    expect_error(end_of(make, [&](Session& s) { iterate(s, {.batch_size = 4, .prefetch_batches = ahead}); }),
                 ExitCode::user_error, "the tape is torn");
  const auto cannot_begin = [&](const StreamShard& shard) -> StreamReader {
    if (shard.worker == last) throw std::runtime_error("there is no tape");
    return [] { return Json{{"i", 1}}; };
  };
  expect_error(end_of(cannot_begin, [&](Session& s) { iterate(s, {}); }), ExitCode::user_error, "there is no tape");
}

TEST(Streams, RowsMustBeAlike) {
  const auto rows = [](std::vector<Json> all) {
    return [all](const StreamShard& shard) {
      return [all, shard, next = std::size_t{0}]() mutable -> std::optional<Json> {
        if (next == all.size()) return {};
        auto row = all[next++];
        if (shard.worker > 0 && row.contains("other")) row = {{"i", {1, 2}}};
        if (row.contains("other")) row.erase("other");
        return row;
      };
    };
  };
  const auto pass = [](Session& session) { iterate(session, {.batch_size = 8}); };
  expect_error(end_of(rows({{{"i", 1}}, {{"i", 2}}, {{"i", 0.5}}}), pass), ExitCode::data,
               "row 2 is i Double[], but the rows before it are i Long[]");
  expect_error(end_of(rows({{{"i", 1}}, {{"i", "x"}}}), pass), ExitCode::data, "\"i\" of row 1 is string");
  expect_error(end_of(rows({Json(3)}), pass), ExitCode::data, "row 0 is number and no JSON object");
  const auto scalars = [](const StreamShard&) {
    return [left = 3]() mutable -> std::optional<Batch> {
      if (left-- == 0) return {};
      return Batch({{"i", torch::tensor(1)}});
    };
  };
  expect_error(end_of(scalars, pass), ExitCode::data, "column \"i\" of the Batch at row 0 has no first dimension");
  const auto uneven = [](const StreamShard&) {
    return [left = 2]() mutable -> std::optional<Batch> {
      if (left-- == 0) return {};
      Batch batch({{"i", torch::arange(3)}});
      if (left == 0) batch.set("x", torch::arange(5));
      return batch;
    };
  };
  expect_error(end_of(uneven, pass), ExitCode::data,
               "the Batch at row 3 has 3 rows, and its column \"x\" has 5. Give columns of the same length");
  if (world().size() > 1)
    expect_error(end_of(rows({{{"i", 1}, {"other", 1}}}), pass), ExitCode::data,
                 "its columns are i Long[] on worker 0 and i Long[2] on worker 1");
  expect_error(end_of(rows({{{"i", 1}}}),
                      [](Session& s) {
                        iterate(s, {.dtypes = {{"x", at::kFloat}}});
                      }),
               ExitCode::data, "no column \"x\"");
}

TEST(Streams, WholeNumbersMayFollowFloats) {
  const auto rows = [](std::vector<Json> all) {
    return [all](const StreamShard&) {
      return [all, next = std::size_t{0}]() mutable -> std::optional<Json> {
        if (next == all.size()) return {};
        return Json{{"x", all[next++]}};
      };
    };
  };
  const auto take = [](BatchOptions options) {
    return [options](Session& session) {
      std::vector<double> taken;
      for (auto& batch : session.get_dataset_shard().iter_torch_batches(options))
        for (std::int64_t i = 0; i < batch.size(); ++i) taken.push_back(batch["x"][i].item<double>());
      EXPECT_EQ(taken, (std::vector<double>{0.5, 2, 1.5, 3}));
    };
  };
  for (const std::int64_t size : {1, 3}) {
    const auto end = end_of(rows({0.5, 2, 1.5, 3}), take({.batch_size = size}));
    EXPECT_EQ(end.first, 0) << end.second;
  }
  const auto whole_first = [](Session& session) {
    std::vector<double> taken;
    for (auto& batch :
         session.get_dataset_shard().iter_torch_batches({.batch_size = 3, .dtypes = {{"x", at::kFloat}}})) {
      EXPECT_EQ(batch["x"].scalar_type(), at::kFloat);
      for (std::int64_t i = 0; i < batch.size(); ++i) taken.push_back(batch["x"][i].item<double>());
    }
    EXPECT_EQ(taken, (std::vector<double>{2, 3, 4, 5, 0.5, 6}));
  };
  const auto end = end_of(rows({2, 3, 4, 5, 0.5, 6}), whole_first);
  EXPECT_EQ(end.first, 0) << end.second;
}

TEST(Streams, WhatNeedsAPositionIsRefused) {
  const auto make = numbered([](int) { return 8; });
  const auto pass = [](BatchOptions options) { return [options](Session& session) { iterate(session, options); }; };
  expect_error(end_of(make, pass({.shuffle = true})), ExitCode::usage, "shuffle is set, but a stream");
  expect_error(end_of(make, pass({.local_shuffle_buffer_size = 4})), ExitCode::usage,
               "local_shuffle_buffer_size is set, but a stream");
  if (world().size() > 1)
    expect_error(end_of(make, pass({.global_batch_size = 1})), ExitCode::usage, "less than the number of workers");
  expect_error(end_of(make, pass({}), {.scaling_config = {.virtual_workers = 12}}), ExitCode::usage, "virtual_workers");
  expect_error(end_of(make, pass({}), {.preprocessor = standard_scaler({"i"})}), ExitCode::usage,
               "the dataset \"train\" is a stream");
  expect_error(end_of(make, [](Session& s) { s.get_dataset_shard().iter_batches().num_batches(); }), ExitCode::usage,
               "it is a stream, and its number of rows is not known");
  expect_error(
      end_of(make,
             [](Session& session) {
               std::int64_t steps = 0;
               auto state = session.state({{"steps", steps}});
               for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 2})) {
                 session.report({{"a", 1}});  // metrics alone are welcome
                 session.report({{"a", 1}}, state);
               }
             }),
      ExitCode::usage, "a pass over the stream \"train\" is under way, and its position cannot be saved");
}

TEST(Streams, ARunGoesOnWithANewPass) {
  const auto storage = test::shared_folder();
  std::vector<std::int64_t> epochs;
  const auto make = [&](const StreamShard& shard) {
    epochs.push_back(shard.epoch);
    return numbered([](int) { return 6; })(shard);
  };
  for (const bool stops : {true, false}) {
    auto options = with("on", Dataset::from_stream(make));
    Samples samples;
    const auto code = run({storage, {}, options}, [&](Session& session, const Config&) {
                        std::int64_t steps = 0;
                        auto state = session.state({{"steps", steps}});
                        EXPECT_EQ(state.restore(), !stops);
                        for (auto epoch : session.epochs(3)) {
                          for (auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 4})) {
                            ++steps;
                            if (stops && epoch == 1 && steps == 3) throw std::runtime_error("in the middle");
                            for (std::int64_t i = 0; i < batch.size(); ++i)
                              samples.push_back(batch["i"][i].item<std::int64_t>());
                          }
                          session.report({{"epoch", epoch}}, state);
                        }
                        EXPECT_EQ(steps, 6);
                        EXPECT_EQ(session.global_step(), 6);
                      }).first;
    EXPECT_EQ(code, stops ? 1 : 0);
    EXPECT_EQ(samples.size(), stops ? 6u : 12u) << "whole epochs";
  }
  EXPECT_EQ(epochs, (std::vector<std::int64_t>{0, 1, 1, 2}));
}

TEST(Streams, AStepTooSmallForTheWorkersIsRefused) {
  if (world().size() == 1) return;
  const auto storage = test::shared_folder();
  // A range of workers keeps the samples of a step when there are more of them.
  const auto train = [&](int workers, std::int64_t epochs, const BatchOptions& batches) {
    auto options = with("small", Dataset::from_stream(numbered([](int) { return 3; })));
    options.scaling_config.num_workers = {1, workers};
    const auto [code, result] =
        run({storage, {"--resume", workers == 1 ? "auto" : "must"}, options}, [&](Session& session, const Config&) {
          std::int64_t rows = 0;
          auto state = session.state({{"rows", rows}});
          state.restore();
          for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
            for (auto& batch : session.get_dataset_shard().iter_batches(batches)) rows += batch.global_size();
            session.report({{"rows", rows}}, state);
          }
        });
    return std::pair(code, result && result->error ? std::string(result->error->what()) : std::string());
  };
  const auto first = train(1, 1, {.batch_size = 1});
  EXPECT_EQ(first.first, 0) << first.second;
  const auto workers = std::to_string(world().size());
  expect_error(train(world().size(), 2, {.batch_size = 1}), ExitCode::usage,
               "a step has fewer rows (1, as before the restart) than there are workers (" + workers + ")");
  const auto again = train(world().size(), 2, {.global_batch_size = world().size()});
  EXPECT_EQ(again.first, 0) << again.second;
}

/// Gives ten rows, and waits then until it is asked to stop.
MakeStream waiting() {
  return [](const StreamShard& shard) {
    return [shard, left = 10]() mutable -> std::optional<Json> {
      if (left-- > 0) return Json{{"i", left}};
      std::mutex mutex;
      std::condition_variable_any never;
      std::unique_lock lock(mutex);
      never.wait(lock, shard.stop, [] { return false; });
      return {};
    };
  };
}

TEST(Streams, AReaderThatWaitsIsAskedToStop) {
  const auto left = end_of(waiting(), [](Session& session) {
    for (int pass = 0; pass < 2; ++pass) {
      std::int64_t steps = 0;
      for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 4}))
        if (++steps == 2) break;
    }
    EXPECT_EQ(session.global_step(), 4);
  });
  EXPECT_EQ(left.first, 0) << left.second;
  const auto thrown = end_of(waiting(), [](Session& session) {
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 4}))
      if (session.global_step() == 2 && session.world_rank() == 0) throw std::runtime_error("of the program");
  });
  EXPECT_EQ(thrown.first, 1);
  EXPECT_NE(thrown.second.find("of the program"), std::string::npos) << thrown.second;
}

TEST(Streams, RandomNumbersAreTheSameAgain) {
  // Of the reader, and of preprocessors that take the generator and that do not.
  struct Drawing : Preprocessor {
    void fit(const Dataset&, const Communicator&) override {}
    bool fitted() const override { return true; }
    Json state() const override { return nullptr; }
    void load_state(const Json&) override {}
  };
  struct Given : Drawing {
    void transform(Batch& batch, at::Generator& generator) const override {
      batch.set("given", at::rand({batch["i"].size(0)}, generator, at::kDouble));
    }
  };
  struct Default : Drawing {
    void transform(Batch& batch) const override { batch.set("default", at::rand({batch["i"].size(0)}, at::kDouble)); }
  };
  const auto make = [](const StreamShard& shard) {
    return [shard, left = 9 - 2 * shard.worker]() mutable -> std::optional<Json> {
      if (left-- <= 0) return {};
      return Json{{"i", left}, {"x", at::rand({1}, shard.generator, at::kDouble).item<double>()}};
    };
  };
  std::set<std::string> runs;
  for (const int ahead : {0, 1, 3}) {
    std::vector<std::string> seen;
    const auto end = end_of(make,
                            [&](Session& session) {
                              for ([[maybe_unused]] const auto epoch : session.epochs(2))
                                for (auto& batch : session.get_dataset_shard().iter_torch_batches(
                                         {.batch_size = 2, .prefetch_batches = ahead})) {
                                  at::rand({3});
                                  for (std::int64_t i = 0; i < batch.size(); ++i)
                                    seen.push_back(Json{batch["x"][i].item<double>(), batch["given"][i].item<double>(),
                                                        batch["default"][i].item<double>()}
                                                       .dump());
                                }
                            },
                            {.preprocessor = chain({std::make_shared<Given>(), std::make_shared<Default>()})});
    EXPECT_EQ(end.first, 0) << end.second;
    EXPECT_EQ(std::set<std::string>(seen.begin(), seen.end()).size(), seen.size());
    runs.insert(Json(seen).dump());
  }
  EXPECT_EQ(runs.size(), 1u);
}

TEST(Streams, FunctionsGetTheSameNumbersInAnyNumberOfThreads) {
  std::set<std::string> runs;
  for (const int threads : {1, 3})
    for (const int ahead : {0, 1, 2}) {
      auto options = with("mapped" + std::to_string(threads) + std::to_string(ahead),
                          Dataset::from_stream(numbered([](int worker) { return 20 - 3 * worker; }))
                              .map_batches([](Batch& batch) { batch.set("z", batch["i"] * 2); }, {.threads = threads})
                              .map_batches(
                                  [](Batch& batch, at::Generator& generator) {
                                    batch.set("n", at::rand({batch["z"].size(0)}, generator, at::kDouble));
                                  },
                                  {.threads = threads})
                              .transform(random_noise({"n"}, 1)));
      Taken taken;
      auto seen = Json::array();
      const auto code =
          run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
            const auto shard = session.get_dataset_shard();
            for (auto& batch : shard.iter_torch_batches({.batch_size = 3, .prefetch_batches = ahead})) {
              taken.take(batch);
              EXPECT_TRUE(at::equal(batch["z"], batch["i"] * 2));
              for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch["n"][i].item<double>());
            }
            for ([[maybe_unused]] auto& batch : shard.iter_torch_batches({.batch_size = 3, .prefetch_batches = ahead}))
              break;
          }).first;
      EXPECT_EQ(code, 0);
      EXPECT_EQ(of_all(taken.samples), rows_of(world().size(), [](int worker) { return 20 - 3 * worker; }));
      EXPECT_EQ(std::set<Json>(seen.begin(), seen.end()).size(), seen.size());
      runs.insert(seen.dump());
    }
  EXPECT_EQ(runs.size(), 1u);
}

TEST(Streams, AFunctionsExceptionEndsThePassOfAllWorkers) {
  auto options = with("thrown", Dataset::from_stream(numbered([](int) { return 40; }))
                                    .map_batches(
                                        [](Batch& batch) {
                                          if ((batch["i"] == 17).any().item<bool>())
                                            throw std::runtime_error("not this row");
                                        },
                                        {.threads = 2}));
  const auto [code, result] = run({test::shared_folder(), {}, options}, [&](Session& session, const Config&) {
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4}))
      EXPECT_LT(batch["i"][0].item<std::int64_t>() % 1000, 17);
  });
  EXPECT_EQ(code, 1);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("not this row"), std::string::npos) << result->error->what();
}

TEST(Streams, PassesThatAreLeftEarlyEndTogether) {
  // Without an end: a program takes as many as it wants.
  const auto make = [](const StreamShard& shard) {
    return [shard]() -> std::optional<Json> { return Json{{"i", shard.worker}}; };
  };
  const auto end = end_of(make, [](Session& session) {
    std::int64_t steps = 0;
    auto state = session.state({{"steps", steps}});
    for (auto epoch : session.epochs(2)) {
      for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 2}))
        if (++steps % 5 == 0) break;
      session.report({{"epoch", epoch}}, state);
    }
    EXPECT_EQ(session.global_step(), 10);
  });
  EXPECT_EQ(end.first, 0) << end.second;
}

}  // namespace
}  // namespace muster::streams_test
