// Metrics of samples over ranks with uneven shards: what one rank with all samples has.
#include "muster/classification.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace muster {
namespace {

using test::run;
using test::world;

constexpr std::int64_t num_classes = 3;

/// 33 samples of 5 pixels, so that in the last step of 4 a rank one or more of 2 to 4 ranks are left empty. Class 2 is
/// rare: some ranks never see it.
struct Samples {
  at::Tensor logits =
      at::sin(at::arange(33 * num_classes * 5, at::kDouble) * 1.7).to(at::kFloat).view({33, num_classes, 5});
  at::Tensor target = at::sin(at::arange(33 * 5, at::kDouble) * 0.9).gt(0.3).to(at::kLong).view({33, 5});
  at::Tensor weight = at::arange(33 * 5, at::kDouble).remainder(4).view({33, 5});
  Samples() { target.select(0, 20).fill_(2); }

  Dataset dataset() const { return Dataset::from_tensors({{"x", logits}, {"y", target}, {"w", weight}}); }
};

/// One of each, and what a report makes of them.
struct All {
  Accuracy accuracy, top2{{.top_k = 2}};
  F1 macro{{num_classes, Average::macro}}, micro{{num_classes, Average::micro}}, each{{num_classes, Average::none}};
  ConfusionMatrix matrix{{num_classes}};
  MeanIoU iou{{num_classes}};
  AUC auc;
  Perplexity perplexity;

  void add(const at::Tensor& x, const at::Tensor& y, const at::Tensor& w, std::int64_t samples) {
    accuracy.add(x, y, samples);
    top2.add(x, y, samples, w);
    macro.add(x, y, samples);
    micro.add(x.argmax(1), y, samples, w);
    each.add(x, y, samples, w.gt(0));
    matrix.add(x, y, samples);
    iou.add(x, y, samples);
    auc.add(x.select(1, 1), y.eq(1), samples, w);
    perplexity.add(x, y, samples);
  }
  Metrics metrics() const {
    return {{"accuracy", accuracy}, {"top2", top2}, {"macro", macro}, {"micro", micro},          {"each", each},
            {"matrix", matrix},     {"iou", iou},   {"auc", auc},     {"perplexity", perplexity}};
  }
  StateEntries entries() {
    return {{"accuracy", accuracy}, {"top2", top2}, {"macro", macro}, {"micro", micro},          {"each", each},
            {"matrix", matrix},     {"iou", iou},   {"auc", auc},     {"perplexity", perplexity}};
  }
};

/// Of all samples on one rank.
Json expected() {
  const Samples samples;
  All all;
  all.add(samples.logits, samples.target, samples.weight, 33);
  return {{"accuracy", all.accuracy.value()}, {"top2", all.top2.value()},     {"macro", all.macro.value()},
          {"micro", all.micro.value()},       {"each", all.each.per_class()}, {"matrix", Metric(all.matrix).value()},
          {"iou", all.iou.value()},           {"auc", all.auc.value()},       {"perplexity", all.perplexity.value()}};
}

void expect_near(const Json& have, const Json& want, const std::string& what) {
  if (want.is_array()) {
    ASSERT_EQ(have.size(), want.size()) << what;
    for (std::size_t i = 0; i < want.size(); ++i) expect_near(have[i], want[i], what);
    return;
  }
  ASSERT_TRUE(have.is_number()) << what << ": " << have;
  EXPECT_NEAR(have.get<double>(), want.get<double>(), 1e-6) << what;
}

void expect_all(const Json& row) {
  const auto want = expected();
  for (const auto& [name, value] : want.items()) expect_near(row.at(name), value, name);
}

TorchTrainerOptions of_samples(const std::string& name) {
  return {.run_config = {.name = name}, .datasets = {{"train", Samples().dataset()}}};
}

TEST(MetricsOverRanks, AreThoseOfOneRankWithAllSamples) {
  const auto storage = test::shared_folder();
  std::int64_t empty = 0;
  const auto [code, result] = run({storage, {}, of_samples("all")}, [&](Session& session, const Config&) {
    All all;
    AUC nothing;
    Accuracy here;
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
      all.add(batch["x"], batch["y"], batch["w"], batch.size());
      empty += batch.size() == 0;
    }
    if (world().rank() == 0) here.add(at::ones({1}, at::kLong), at::ones({1}, at::kLong));
    auto metrics = all.metrics();
    metrics.emplace("nothing", nothing);
    metrics.emplace("one", here);
    session.report(metrics);
    session.report({{"one", here}}, {.reduce = false});
  });
  ASSERT_EQ(code, 0) << (result->error ? result->error->what() : "");
  ASSERT_EQ(result->metrics_history.size(), 2u);
  const auto& row = result->metrics_history.at(0);
  expect_all(row);
  EXPECT_TRUE(row.at("nothing").is_null());
  EXPECT_EQ(row.at("one"), 1) << "a rank without samples has no say";
  auto list = Json::array({1});
  while (list.size() < static_cast<std::size_t>(world().size())) list.push_back(nullptr);
  EXPECT_EQ(result->metrics_history.at(1).at("one"), list);
  const auto left_empty = world().all_reduce(empty);
  EXPECT_EQ(left_empty > 0, world().size() == 2 || world().size() == 4);
}

struct Counting : TrainingOperator {
  void setup(const Config&) override {
    const OperatorLoader samples(Samples().dataset(), {.batch_size = 4});
    register_data(samples, samples);
  }
  Metrics train_epoch(OperatorBatches& batches, const EpochInfo&) override {
    All all;
    for (auto& batch : batches) all.add(batch["x"], batch["y"], batch["w"], batch.size());
    return all.metrics();
  }
  Metrics validate(OperatorBatches& batches, const EpochInfo& info) override { return train_epoch(batches, info); }
};

TEST(MetricsOverRanks, AreThoseOfAllSamplesInAnOperatorsResultsToo) {
  const auto storage = test::shared_folder();
  std::vector<std::string> words{"job", "--storage", storage.string(), "--log-level", "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  EXPECT_EQ(launch.run([&] {
    OperatorTrainer<Counting> trainer(launch, {.num_workers = launch.size()});
    expect_all(trainer.train());
    expect_all(trainer.validate());
  }),
            0);
}

TEST(MetricsOverRanks, CoverTheWholeOfAResumedEpoch) {
  const auto storage = test::shared_folder();
  const auto attempt = [&](const std::string& name, const std::vector<std::string>& flags, std::int64_t stop_at) {
    return run({storage, flags, of_samples(name)}, [&](Session& session, const Config&) {
      All all;
      auto state = session.state(all.entries());
      state.restore();
      auto shard = session.get_dataset_shard();
      for ([[maybe_unused]] auto epoch : session.epochs(1)) {
        for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .shuffle = true})) {
          all.add(batch["x"], batch["y"], batch["w"], batch.size());
          session.report({}, state);
          if (session.global_step() == stop_at) throw std::runtime_error("stopped here");
        }
        session.report(all.metrics(), state);
      }
    });
  };
  for (const auto& workers : std::set{std::to_string(world().size()), std::string("1")}) {
    const auto name = "resumed_by_" + workers;
    EXPECT_EQ(attempt(name, {}, 2).first, 1);
    const auto [code, result] = attempt(name, {"--workers", workers}, -1);
    ASSERT_EQ(code, 0) << (result->error ? result->error->what() : "");
    expect_all(result->metrics);
  }
}

TEST(MetricsOverRanks, OneThatIsAnotherOnSomeRanksIsRefusedEverywhere) {
  if (world().size() == 1) return;
  const auto storage = test::shared_folder();
  const auto fails = [&](const std::string& name, const std::function<Metric()>& metric) {
    const auto [code, result] = run({storage, {}, of_samples(name)}, [&](Session& session, const Config&) {
      session.report({{"f1", metric()}});
    });
    EXPECT_EQ(code, 1);
    return std::string(result->error ? result->error->what() : "no error");
  };
  const bool first = world().rank() == 0;
  const auto options = fails("options", [&] { return F1({.num_classes = first ? 2 : 3, .average = Average::macro}); });
  EXPECT_NE(options.find("num_classes"), std::string::npos) << options;
  const auto kinds = fails("kinds", [&] { return first ? Metric(0.5) : Metric(F1()); });
  EXPECT_NE(kinds.find("plain value"), std::string::npos) << kinds;
}

}  // namespace
}  // namespace muster
