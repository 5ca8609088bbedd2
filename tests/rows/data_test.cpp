// Datasets and preprocessors as users of Ray know them.
#include "muster/muster.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::data_test {
namespace {

using test::run;
using test::world;

/// Of all ranks, in order. Collective.
std::vector<double> of_all(const std::vector<double>& mine) {
  std::vector<double> all;
  for (const auto& theirs : world().all_gather(Json(mine).dump()))
    for (const auto& value : Json::parse(theirs)) all.push_back(value);
  std::sort(all.begin(), all.end());
  return all;
}

// ray.data.from_items([{"x": x, "y": 2 * x + 1} for x in range(200)]), and from_items([1, 2, 3]).
TEST(TrainRow, FromItems) {
  Json rows;
  std::vector<double> xs;
  for (int x = 0; x < 200; ++x) {
    rows.push_back({{"x", x}, {"y", 2 * x + 1}});
    xs.push_back(x);
  }
  TorchTrainerOptions options{.run_config = {.name = "items"}, .datasets = {{"train", Dataset::from_items(rows)}}};
  std::vector<double> seen;
  const auto storage = test::shared_folder();
  auto code = run({storage, {}, options}, [&](Session& session, const Config&) {
                auto net = session.prepare_model(torch::nn::Linear(1, 1));
                for (auto& batch : session.get_dataset_shard("train").iter_torch_batches(
                         {.batch_size = 32, .dtypes = {{"x", at::kFloat}, {"y", at::kFloat}}})) {
                  const auto inputs = torch::unsqueeze(batch["x"], 1), labels = torch::unsqueeze(batch["y"], 1);
                  torch::mse_loss(net->forward(inputs), labels).backward();
                  EXPECT_TRUE(at::equal(labels, 2 * inputs + 1));
                  for (std::int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch["x"][i].item<double>());
                }
              }).first;
  EXPECT_EQ(code, 0);
  EXPECT_EQ(of_all(seen), xs);

  options = {.run_config = {.name = "numbers"}, .datasets = {{"train", Dataset::from_items({1, 2, 3})}}};
  seen.clear();
  code = run({storage, {}, options}, [&](Session& session, const Config&) {
           for (auto& batch : session.get_dataset_shard().iter_batches({.batch_size = 1})) {
             EXPECT_EQ(batch["item"].scalar_type(), at::kLong);
             if (batch.size() > 0) seen.push_back(batch["item"].item<double>());
           }
         }).first;
  EXPECT_EQ(code, 0);
  EXPECT_EQ(of_all(seen), (std::vector<double>{1, 2, 3}));

  // Each rank makes its own dataset; differences are found before training.
  if (world().size() == 1) return;
  options = {.run_config = {.name = "differ"}, .datasets = {{"train", Dataset::from_items({1, 2, world().rank()})}}};
  const auto [differs, result] = run({storage, {}, options}, [](Session&, const Config&) { ADD_FAILURE(); });
  EXPECT_EQ(differs, static_cast<int>(ExitCode::data));
}

/// x less its mean over the training set, and how often that was learned.
class Center : public Preprocessor {
 public:
  void fit(const Dataset& dataset, const Communicator& communicator) override {
    ++fits;
    // Each rank checks its share.
    double sum = 0;
    for (auto i = std::int64_t{communicator.rank()}; i < dataset.count(); i += communicator.size()) {
      const std::vector<std::int64_t> sample{i};
      sum += dataset.read(sample)["x"].item<double>();
    }
    mean_ = communicator.all_reduce(sum) / static_cast<double>(dataset.count());
  }
  bool fitted() const override { return mean_.has_value(); }
  void transform(Batch& batch) const override { batch.set("x", batch["x"] - *mean_); }
  Json state() const override { return {{"mean", *mean_}}; }
  void load_state(const Json& state) override { mean_ = state.at("mean").get<double>(); }

  int fits = 0;

 private:
  std::optional<double> mean_;
};

// Fitted on "train", applied to every dataset, saved with the checkpoint and restored from it.
TEST(TrainRow, Preprocessor) {
  const auto storage = test::shared_folder();
  const auto go = [&](Dataset train, const std::shared_ptr<Center>& center, bool stops) {
    TorchTrainerOptions options{
        .run_config = {.name = "centered"},
        .datasets = {{"train", std::move(train)}, {"test", Dataset::from_items({{{"x", 10.0}}})}},
        .preprocessor = center};
    return run({storage, {}, options},
               [&](Session& session, const Config&) {
                 std::int64_t epochs = 0;
                 auto state = session.state({{"epochs", epochs}});
                 EXPECT_EQ(state.restore(), !stops);
                 for ([[maybe_unused]] auto epoch : session.epochs(2)) {
                   at::Tensor sum = at::zeros({1}, at::kDouble);
                   for (auto& batch : session.get_dataset_shard("train").iter_torch_batches())
                     sum += batch["x"].narrow(0, 0, batch.size()).sum();
                   if (stops) {
                     EXPECT_NEAR((session.mean(sum) * session.world_size()).item<double>(), 0, 1e-9);
                   }
                   for (auto& batch : session.get_dataset_shard("test").iter_torch_batches())
                     EXPECT_DOUBLE_EQ(batch["x"].item<double>(), 10 - 2.0);
                   ++epochs;
                   session.report({{"a", 1}}, state);
                   if (stops) throw std::runtime_error("the job ends");
                 }
                 EXPECT_EQ(epochs, 2);
               })
        .first;
  };
  const auto first = std::make_shared<Center>(), second = std::make_shared<Center>();
  EXPECT_EQ(go(Dataset::from_items({{{"x", 0.0}}, {{"x", 1.0}}, {{"x", 5.0}}}), first, true), 1);
  EXPECT_EQ(first->fits, 1);
  // Another training set would give another mean; the run goes on with the mean that it had.
  EXPECT_EQ(go(Dataset::from_items({{{"x", 100.0}}, {{"x", 1.0}}, {{"x", 5.0}}}), second, false), 0);
  EXPECT_EQ(second->fits, 0);
  EXPECT_EQ(second->state(), first->state());
}

}  // namespace
}  // namespace muster::data_test
