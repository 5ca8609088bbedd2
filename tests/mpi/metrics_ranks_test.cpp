// Metrics of samples over ranks with uneven shards equal those of one rank with all samples.
#include "muster/classification.hpp"

#include "base/file.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace muster::metrics_ranks_test {
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

/// One metric of each kind, and their values in a report.
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

/// Computed from all samples on one rank.
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

TEST(MetricsOverRanks, AreTakenByTheReportThatEndsTheEpoch) {
  const auto storage = test::shared_folder();
  const auto attempt = [&](std::int64_t fails_after) {
    return run({storage, {}, of_samples("taken")}, [&](Session& session, const Config&) {
      All all;
      Mean mean;
      auto entries = all.entries();
      entries.emplace_back("mean", mean);
      auto state = session.state(entries);
      state.restore();
      const auto shard = session.get_dataset_shard();
      for (auto epoch : session.epochs(2)) {
        for (auto& batch : shard.iter_torch_batches({.batch_size = 4})) {
          // The first epoch counts other samples than the second.
          const auto x = epoch == 0 ? at::zeros_like(batch["x"]) : batch["x"];
          all.add(x, batch["y"], batch["w"], batch.size());
          mean.add(static_cast<double>(epoch), batch.size());
        }
        session.report({{"accuracy", all.accuracy.take()},
                        {"top2", all.top2.take()},
                        {"macro", all.macro.take()},
                        {"micro", all.micro.take()},
                        {"each", all.each.take()},
                        {"matrix", all.matrix.take()},
                        {"iou", all.iou.take()},
                        {"auc", all.auc.take()},
                        {"perplexity", all.perplexity.take()},
                        {"mean", mean.take()}},
                       state);
        if (epoch == fails_after) throw std::runtime_error("killed between two epochs");
      }
    });
  };
  EXPECT_EQ(attempt(0).first, 1);
  const auto [code, result] = attempt(-1);
  ASSERT_EQ(code, 0) << (result->error ? result->error->what() : "");
  ASSERT_EQ(result->metrics_history.size(), 2u);
  expect_all(result->metrics);
  EXPECT_EQ(result->metrics.at("mean"), 1);
  EXPECT_NE(result->metrics_history.front().at("accuracy"), result->metrics.at("accuracy"));
}

TEST(MetricsOverRanks, AConfusionMatrixOfADatasetThatIsNotSplitIsWarnedOfOnce) {
  const auto storage = test::shared_folder();
  const auto log_after = [&](const std::string& name, const DataConfig& config, bool counts_whole) {
    TorchTrainerOptions options{.dataset_config = config, .run_config = {.name = name}};
    options.datasets = {{"train", Samples().dataset()}, {"valid", Samples().dataset()}};
    const auto [code, result] = run({storage, {"--log-level", "warn"}, options}, [&](Session& session, const Config&) {
      const auto train = session.get_dataset_shard(), valid = session.get_dataset_shard("valid");
      for (int epoch = 0; epoch < 2; ++epoch) {
        ConfusionMatrix matrix({num_classes});
        Accuracy accuracy;
        const auto& shard = counts_whole ? valid : train;
        for (auto& batch : shard.iter_torch_batches({.batch_size = 4})) {
          matrix.add(batch["x"], batch["y"], batch.size());
          accuracy.add(batch["x"], batch["y"], batch.size());
        }
        session.report({{"accuracy", accuracy}, {"matrix", matrix}});
      }
    });
    EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
    return detail::read_file(storage / name / "logs" / "rank_00000.log");
  };
  const auto whole = log_after("whole", {}, true);
  if (world().size() > 1) {
    for (const char* part : {"\"matrix\"", "\"valid\"", "split_all"})
      EXPECT_NE(whole.find(part), std::string::npos) << whole;
    EXPECT_EQ(whole.find("split_all"), whole.rfind("split_all")) << "once: " << whole;
  } else {
    EXPECT_EQ(whole.find("split_all"), std::string::npos) << whole;
  }
  EXPECT_EQ(log_after("split", {.split_all = true}, true).find("split_all"), std::string::npos);
  EXPECT_EQ(log_after("train", {}, false).find("split_all"), std::string::npos) << "the data that are split";
}

TEST(MetricsOverRanks, OneThatIsNoNumberIsNamedOnAllRanks) {
  const auto storage = test::shared_folder();
  const auto [code, result] = run({storage, {}, of_samples("tensors")}, [&](Session& session, const Config&) {
    const bool last = session.world_rank() == session.world_size() - 1;
    session.report({{"loss", 1.0}, {"by_class", last ? at::ones({3}) : at::ones({1})}});
  });
  EXPECT_EQ(code, 1);
  const std::string text(result->error ? result->error->what() : "no error");
  for (const char* part : {"\"by_class\"", "shape [3]"}) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(MetricsOverRanks, AListHasNullForARankThatLacksTheKey) {
  const auto storage = test::shared_folder();
  const int last = world().size() - 1;
  const auto [code, result] = run({storage, {}, of_samples("list")}, [&](Session& session, const Config&) {
    Metrics metrics{{"all", session.world_rank()}};
    if (session.world_rank() == last) metrics.emplace("one", 7);
    session.report(metrics, {.reduce = false});
  });
  ASSERT_EQ(code, 0) << (result->error ? result->error->what() : "");
  Json all = Json::array(), one = Json::array();
  for (int r = 0; r <= last; ++r) all.push_back(r), one.push_back(r == last ? Json(7) : Json());
  EXPECT_EQ(result->metrics.at("all"), all);
  EXPECT_EQ(result->metrics.at("one"), one);
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
}  // namespace muster::metrics_ranks_test
