// Options of passes that differ between the ranks.
#include "base/file.hpp"
#include "muster/data_loader.hpp"
#include "muster/muster.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace muster::same_passes_test {
namespace {

using test::run;
using test::world;

int last_rank() { return world().size() - 1; }
bool is_last() { return world().rank() == last_rank(); }

TorchTrainerOptions named(std::string name) {
  return {.dataset_config = {.split_all = true},
          .run_config = {.name = std::move(name)},
          .datasets = {{"train", test::line()}}};
}

at::Tensor weights_of(double first) {
  auto weights = at::ones({46}, at::kDouble);
  weights[0] = first;
  return weights;
}

/// Runs `loop` on all ranks, and expects them to end alike: well if `fact` is empty, otherwise with that error. With
/// one rank nothing can differ.
void expect(const std::string& name, const std::string& fact, const std::function<void(Session&)>& loop) {
  const bool fails = !fact.empty() && world().size() > 1;
  const auto [code, result] =
      run({test::shared_folder(), {}, named(name)}, [&](Session& session, const Config&) { loop(session); });
  EXPECT_EQ(code, fails ? 64 : 0) << name << ": " << (result && result->error ? result->error->what() : "no error");
  const std::string text = result && result->error ? result->error->what() : "";
  for (const auto& other : world().all_gather(text)) EXPECT_EQ(other, text);
  if (!fails) return;
  EXPECT_EQ(text, "comparing the passes over \"train\" on all ranks: " + fact + " on rank " +
                      std::to_string(last_rank()) +
                      ". Give the same options on every rank; weights that are computed on one rank must be "
                      "broadcast");
}

TEST(SamePasses, AnOptionThatDiffersIsNamedOnEveryRank) {
  const std::vector<std::pair<std::string, std::function<void(BatchOptions&)>>> cases{
      {"batch_size is 4 on rank 0 and 5", [](auto& options) { options.batch_size = 5; }},
      {"batch_size is 4 on rank 0 and not given", [](auto& options) { options.global_batch_size = 12; }},
      {"shuffle is false on rank 0 and true", [](auto& options) { options.shuffle = true; }},
      {"drop_last is false on rank 0 and true", [](auto& options) { options.drop_last = true; }},
      {"local_shuffle_buffer_size is not given on rank 0 and 3",
       [](auto& options) { options.local_shuffle_buffer_size = 3; }},
      {"", [](auto& options) { options.prefetch_batches = 3; }},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    std::int64_t batches = 0;
    expect("option" + std::to_string(i), cases[i].first, [&](Session& session) {
      BatchOptions options{.batch_size = 4};
      if (is_last()) cases[i].second(options);
      for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches(options)) ++batches;
      session.report({});
    });
    if (cases[i].first.empty() || world().size() == 1) continue;
    EXPECT_EQ(batches, 1);
  }
}

TEST(SamePasses, AreNamedWhereOneRankMakesFewerSteps) {
  const std::vector<std::pair<std::string, BatchOptions>> cases{
      {"batch_size is 2 on rank 0 and 4", {.batch_size = 4}},
      {"batch_size is 2 on rank 0 and 1", {.batch_size = 1}},
      {"drop_last is false on rank 0 and true", {.batch_size = 2, .drop_last = true}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i)
    expect("steps" + std::to_string(i), cases[i].first, [&](Session& session) {
      auto net = session.prepare_model(torch::nn::Linear(1, 1));
      const BatchOptions options = is_last() && last_rank() > 0 ? cases[i].second : BatchOptions{.batch_size = 2};
      for (auto& batch : session.get_dataset_shard().iter_torch_batches(options))
        net->forward(batch["x"]).sum().backward();
      session.report({});
    });
}

TEST(SamePasses, WeightsThatDifferAreNamedOnEveryRank) {
  const std::vector<std::function<void(BatchOptions&)>> changes{
      [](auto& options) { options.weights = weights_of(1 + 1e-12); },
      [](auto& options) { options.weights = at::Tensor(); },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    std::string text;
    const auto [code, result] =
        run({test::shared_folder(), {}, named("weights" + std::to_string(i))}, [&](Session& session, const Config&) {
          BatchOptions options{.batch_size = 4, .weights = weights_of(1)};
          if (is_last()) changes[i](options);
          for (auto& batch : session.get_dataset_shard().iter_torch_batches(options)) static_cast<void>(batch);
        });
    if (world().size() == 1) {
      EXPECT_EQ(code, 0);
      continue;
    }
    EXPECT_EQ(code, 64);
    ASSERT_TRUE(result && result->error);
    text = result->error->what();
    EXPECT_NE(text.find("weights is a tensor with the hash "), std::string::npos) << text;
    EXPECT_NE(text.find(i == 0 ? " and a tensor with the hash " : " and not given on rank "), std::string::npos)
        << text;
    for (const auto& other : world().all_gather(text)) EXPECT_EQ(other, text);
  }
  expect("same_weights", "", [](Session& session) {
    for (auto& batch :
         session.get_dataset_shard().iter_torch_batches({.batch_size = 4, .weights = weights_of(7), .num_samples = 9}))
      static_cast<void>(batch);
  });
  expect("draws", "num_samples is 9 on rank 0 and 10", [](Session& session) {
    for (auto& batch : session.get_dataset_shard().iter_torch_batches(
             {.batch_size = 1, .weights = weights_of(7), .num_samples = is_last() && world().size() > 1 ? 10 : 9}))
      static_cast<void>(batch);
  });
}

TEST(SamePasses, OfOneBatchAreComparedAtTheReport) {
  bool reported = false;
  expect("one_batch", "shuffle is false on rank 0 and true", [&](Session& session) {
    for (auto& batch :
         session.get_dataset_shard().iter_torch_batches({.batch_size = 50, .shuffle = is_last() && last_rank() > 0}))
      static_cast<void>(batch);
    session.report({});
    reported = true;
  });
  EXPECT_EQ(reported, world().size() == 1);
}

TEST(SamePasses, ThatTrainOnSomeRanksOnlyAreAWarning) {
  for (const bool differ : {false, true}) {
    const auto storage = test::shared_folder();
    const std::string name = differ ? "some_train" : "all_train";
    const auto code = run({storage, {"--log-level", "warn"}, named(name)}, [&](Session& session, const Config&) {
                        auto net = session.prepare_model(torch::nn::Linear(1, 1));
                        for (int epoch = 0; epoch < 2; ++epoch) {
                          for (auto& batch : session.get_dataset_shard().iter_torch_batches(
                                   {.global_batch_size = 12, .training = !differ || !is_last()}))
                            net->forward(batch["x"]).sum().backward();
                          session.report({});
                        }
                      }).first;
    EXPECT_EQ(code, 0);
    const auto log = detail::read_file(storage / name / "logs" / "rank_00000.log");
    const std::string warning = "rank 0 has taken 4 training steps and rank " + std::to_string(last_rank()) + " 0.";
    const auto found = log.find(warning);
    EXPECT_EQ(found != std::string::npos, differ && world().size() > 1) << log;
    if (found != std::string::npos) {
      EXPECT_EQ(log.find("training steps and rank", found + warning.size()), std::string::npos) << "once";
    }
  }
}

TEST(SamePasses, OfOneRankInsideABatchOfAnotherPassAreNotCompared) {
  for (const int inside : {0, 1})
    expect("nested_" + std::to_string(inside), "", [&](Session& session) {
      auto shard = session.get_dataset_shard();
      auto model = session.prepare_model(torch::nn::Linear(1, 1));
      int number = 0;
      for (auto& batch : shard.iter_torch_batches({.batch_size = 4})) {
        model->forward(batch["x"]).sum().backward();
        if (number++ != inside || !is_last()) continue;
        EXPECT_EQ((*shard.iter_torch_batches({.batch_size = 2, .shuffle = true}).begin()).size(), 2);
      }
      session.report({});
    });
}

TEST(SamePasses, WithAveragedGradientsAreComparedAtTheReport) {
  expect("averaged", "shuffle is false on rank 0 and true", [&](Session& session) {
    auto model = session.prepare_model(torch::nn::Linear(1, 1));
    for (auto& batch :
         session.get_dataset_shard().iter_torch_batches({.batch_size = 4, .shuffle = is_last() && last_rank() > 0}))
      model->forward(batch["x"]).sum().backward();
    session.report({});
  });
}

TEST(SamePasses, OfLaterEpochsAreComparedToo) {
  std::int64_t epochs = 0;
  expect("later", "shuffle is false on rank 0 and true", [&](Session& session) {
    for (const auto epoch : session.epochs(4)) {
      const BatchOptions options{.batch_size = 4, .shuffle = epoch == 2 && is_last() && last_rank() > 0};
      for (auto& batch : session.get_dataset_shard().iter_torch_batches(options)) static_cast<void>(batch);
      session.report({});
      ++epochs;
    }
  });
  EXPECT_EQ(epochs, world().size() == 1 ? 4 : 2);
}

TEST(SamePasses, ThatDoNotTrainOrAreOfOneRankAreNotCompared) {
  expect("free", "", [&](Session& session) {
    auto shard = session.get_dataset_shard();
    // A rank alone looks at a batch to see its shape.
    if (is_last()) {
      EXPECT_EQ((*shard.iter_torch_batches({.batch_size = 2, .shuffle = true}).begin()).size(), 2);
    }
    for ([[maybe_unused]] const auto epoch : session.epochs(2)) {
      for (auto& batch : shard.iter_torch_batches({.batch_size = 4})) static_cast<void>(batch);
      if (world().rank() == 0)
        for (auto& batch : shard.iter_torch_batches({.batch_size = 7, .training = false})) static_cast<void>(batch);
      session.report({});
    }
  });
}

TEST(SamePasses, OfDataLoadersAreCompared) {
  const auto [code, result] = run({test::shared_folder(), {}, named("loader")}, [](Session& session, const Config&) {
    auto data = torch::data::datasets::TensorDataset(at::arange(40))
                    .map(torch::data::transforms::Stack<torch::data::TensorExample>());
    auto loader = prepare_data_loader(session, std::move(data),
                                      {.batch_size = static_cast<std::size_t>(is_last() && last_rank() > 0 ? 3 : 2)});
    for (auto& batch : *loader) static_cast<void>(batch);
  });
  EXPECT_EQ(code, world().size() > 1 ? 64 : 0);
  const std::string text = result && result->error ? result->error->what() : "";
  if (world().size() == 1) return;
  EXPECT_NE(text.find("batch_size is 2 on rank 0 and 3 on rank "), std::string::npos) << text;
}

TEST(SamePasses, AnErrorOfOneRankBeforeTheComparisonEndsAll) {
  const auto [code, result] = run({test::shared_folder(), {}, named("alone")}, [](Session& session, const Config&) {
    BatchOptions options{.batch_size = 4, .weights = weights_of(1)};
    if (is_last()) options.weights = at::ones({45}, at::kDouble);
    for (auto& batch : session.get_dataset_shard().iter_torch_batches(options)) static_cast<void>(batch);
  });
  EXPECT_EQ(code, 64);
  ASSERT_TRUE(result && result->error);
  EXPECT_NE(std::string(result->error->what()).find("weights"), std::string::npos) << result->error->what();
}

}  // namespace
}  // namespace muster::same_passes_test
