// The counterpart of Ray Train's ValidationConfig.
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <string>

namespace muster::validation_test {
namespace {

/// The distance of a checkpoint's weights from the line.
Metrics validate(Session& session, const Checkpoint& checkpoint) {
  torch::nn::Linear net(1, 1);
  checkpoint.load("model", net);
  Mean loss;
  for (auto& batch : session.get_dataset_shard("test").iter_torch_batches({.batch_size = 10}))
    loss.add((net->forward(batch["x"]) - batch["y"]).square().mean(), batch.size());
  return {{"val_loss", loss}};
}

TEST(TodayRow, ValidationBesideTraining) {
  const int workers = std::max(1, test::world().size() - 1);  // one validates, where there are several
  const auto train = [](Session& session, const Config&) {
    auto net = session.prepare_model(torch::nn::Linear(1, 1));
    auto state = session.state({{"model", net}});
    for (const double weight : {1.0, 3.0, 2.0}) {
      const at::NoGradGuard no_grad;
      net->weight.fill_(weight);
      net->bias.fill_(-1);
      session.report({{"weight", weight}}, state, {.validation = true});
    }
  };
  const auto [code, result] =
      test::run({test::shared_folder(),
                 {},
                 {.scaling_config = {.num_workers = workers},
                  .run_config = {.name = "row",
                                 .checkpoint_config = {.num_to_keep = 1,
                                                       .checkpoint_score_attribute = "val_loss",
                                                       .checkpoint_score_order = ScoreOrder::min}},
                  .datasets = {{"train", test::line()}, {"test", test::line()}},
                  .validation = {.function = validate, .timeout = std::chrono::minutes(10)}}},
                train);
  EXPECT_EQ(code, 0) << (result && result->error ? result->error->what() : "");
  ASSERT_EQ(result->metrics_history.size(), 3u);
  for (const auto& row : result->metrics_history) EXPECT_EQ(row.at("checkpoint_status"), "validated");
  EXPECT_NEAR(result->metrics_history[1].at("val_loss").get<double>(), 0, 1e-9);
  EXPECT_GT(result->metrics_history[0].at("val_loss").get<double>(), 0.1);
  const auto& [best, metrics] = result->best_checkpoints.front();
  EXPECT_EQ(metrics.at("weight"), 3.0) << "the best by what the validation has found";
}

}  // namespace
}  // namespace muster::validation_test
