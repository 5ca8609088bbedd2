#include "muster/classification.hpp"
#include "muster/error.hpp"
#include "muster/metrics.hpp"
#include "observe/metrics.hpp"
#include "state/collect.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace muster::classification_test {
namespace {

using detail::observe::list_over_ranks;
using detail::observe::mean_over_ranks;
const double nan = std::numeric_limits<double>::quiet_NaN();
const double inf = std::numeric_limits<double>::infinity();

at::Tensor classes(const std::vector<std::int64_t>& values) { return at::tensor(values, at::kLong); }
at::Tensor numbers(const std::vector<double>& values) { return at::tensor(values, at::kDouble).to(at::kFloat); }

/// The reduction of one metric of each rank, as in a report.
template <class M>
Json reduced(const std::vector<M>& ranks, bool mean = true) {
  std::vector<Json> encoded;
  for (const auto& metric : ranks)
    encoded.push_back(Json::from_cbor(Json::to_cbor(detail::observe::to_json({{"m", metric}}))));
  return (mean ? mean_over_ranks(encoded) : list_over_ranks(encoded)).at("m");
}

template <class M>
M with(M metric, auto&&... arguments) {
  metric.add(arguments...);
  return metric;
}

std::string refusal(const std::function<void()>& call, ExitCode code = ExitCode::user_error) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Accuracy, OfClassesAndLogits) {
  Accuracy accuracy;
  EXPECT_TRUE(std::isnan(accuracy.value()));
  EXPECT_TRUE(reduced(std::vector{accuracy}).is_null());
  accuracy.add(classes({0, 1, 2, 2}), classes({0, 1, 1, 2}));
  EXPECT_EQ(accuracy.value(), 0.75);
  accuracy.add(numbers({0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.6, 0.4}).view({4, 2}), classes({0, 0, 1, 1}));
  EXPECT_EQ(accuracy.value(), 5.0 / 8);
  accuracy.add(classes({1, 0}).to(at::kBool), classes({1, 1}).to(at::kBool));
  EXPECT_EQ(accuracy.value(), 6.0 / 10);
  accuracy.reset();
  EXPECT_TRUE(std::isnan(accuracy.value()));
  const auto pixels = at::zeros({2, 3, 4, 5});
  pixels.select(1, 2).fill_(1);
  accuracy.add(pixels, at::full({2, 4, 5}, 2, at::kInt));
  EXPECT_EQ(accuracy.value(), 1);
}

TEST(Accuracy, OfTheLargestFew) {
  const auto logits = numbers({0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1, 0.3, 0.1, 0.4, 0.2}).view({3, 4});
  const auto target = classes({2, 2, 1});
  EXPECT_EQ(with(Accuracy(), logits, target).value(), 0);
  EXPECT_DOUBLE_EQ(with(Accuracy({.top_k = 2}), logits, target).value(), 1.0 / 3);
  EXPECT_DOUBLE_EQ(with(Accuracy({.top_k = 3}), logits, target).value(), 2.0 / 3);
  EXPECT_EQ(with(Accuracy({.top_k = 9}), logits, target).value(), 1);
  // A model that scores all classes equally is right where the target is class 0.
  EXPECT_EQ(with(Accuracy(), at::zeros({4, 4}), classes({0, 1, 2, 3})).value(), 0.25);
  EXPECT_EQ(with(Accuracy({.top_k = 2}), at::zeros({4, 4}), classes({0, 1, 2, 3})).value(), 0.5);
  EXPECT_EQ(with(Accuracy(), at::full({4, 4}, nan), classes({0, 1, 2, 3})).value(), 0);
  EXPECT_EQ(with(Accuracy(), numbers({nan, 1, 2}).view({1, 3}), classes({2})).value(), 0);
}

TEST(SampleMetrics, CountWhatCounts) {
  const auto prediction = classes({0, 1, 1, 0}), target = classes({0, 1, 0, 255});
  EXPECT_EQ(with(Accuracy(), prediction, target, 2).value(), 1);
  EXPECT_TRUE(std::isnan(with(Accuracy(), prediction, target, 0).value())) << "a rank that is left empty";
  EXPECT_DOUBLE_EQ(with(Accuracy(), prediction, target, std::nullopt, target.ne(255)).value(), 2.0 / 3);
  EXPECT_DOUBLE_EQ(with(Accuracy(), prediction, target, 3, numbers({1, 0.5, 2.5, 7})).value(), 1.5 / 4);
  EXPECT_EQ(with(MeanIoU(), prediction, target, 4, target.ne(255)).per_class(), (std::vector{0.5, 0.5}));
  EXPECT_DOUBLE_EQ(with(F1(), prediction, target, 4, target.ne(255)).value(), 2.0 / 3);
  // A weight for each sample of several pixels.
  const auto pixels = classes({0, 0, 1, 1}).view({2, 2});
  EXPECT_EQ(with(Accuracy(), pixels, at::zeros_like(pixels), 2, numbers({3, 1})).value(), 0.75);
  for (const auto& none : {at::empty({0}, at::kLong)}) {
    EXPECT_TRUE(std::isnan(with(Accuracy(), none, none).value()));
    EXPECT_TRUE(std::isnan(with(F1(), at::empty({0, 2}), none).value()));
    EXPECT_TRUE(std::isnan(with(AUC(), at::empty({0}), none).value()));
    EXPECT_TRUE(std::isnan(with(Perplexity(), at::empty({0, 5}), none).value()));
    EXPECT_TRUE(std::isnan(with(MeanIoU(), at::empty({0, 2}), none, 0, at::empty({0})).value()));
  }
  auto needs_gradients = at::zeros({1, 2}).requires_grad_();
  EXPECT_EQ(with(Accuracy(), needs_gradients, classes({0})).value(), 1);
}

// Computed by hand: class 0: 2 of 3 found, 2 of 2 right; class 1: 1 of 1, 1 of 2; class 2: 1 of 1, 1 of 1; class 3:
// never.
const auto some_predictions = classes({0, 0, 1, 1, 2}), some_targets = classes({0, 0, 0, 1, 2});

TEST(F1, ByEachAverage) {
  const auto f1 = [&](Average average) { return with(F1({4, average}), some_predictions, some_targets); };
  EXPECT_DOUBLE_EQ(f1(Average::macro).value(), (0.8 + 2.0 / 3 + 1) / 3) << "a class that never occurs has no say";
  EXPECT_DOUBLE_EQ(f1(Average::micro).value(), 0.8);
  EXPECT_TRUE(std::isnan(f1(Average::none).value()));
  const auto each = f1(Average::none).per_class();
  ASSERT_EQ(each.size(), 4u);
  EXPECT_DOUBLE_EQ(each[0], 0.8);
  EXPECT_DOUBLE_EQ(each[1], 2.0 / 3);
  EXPECT_EQ(each[2], 1);
  EXPECT_TRUE(std::isnan(each[3]));
  const auto row = reduced(std::vector{f1(Average::none)});
  EXPECT_EQ(row, (Json{0.8, 2.0 / 3, 1.0, nullptr}));

  F1 binary;
  EXPECT_TRUE(std::isnan(with(binary, classes({0, 0}), classes({0, 0})).value())) << "nothing of class 1";
  EXPECT_EQ(with(binary, classes({0, 0}), classes({0, 1})).value(), 0);
  EXPECT_DOUBLE_EQ(with(binary, numbers({-1, 2, 3}).gt(0), classes({1, 1, 0})).value(), 0.5);
}

TEST(SampleMetrics, AreTheSameByDeterministicAlgorithms) {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  const auto matrix = with(ConfusionMatrix({.num_classes = 4}), some_predictions, some_targets, 4);
  const auto none = with(ConfusionMatrix({.num_classes = 4}), some_predictions, some_targets, 0);
  const auto f1 = with(F1({4, Average::macro}), some_predictions, some_targets);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  EXPECT_TRUE(
      at::equal(matrix.value(), with(ConfusionMatrix({.num_classes = 4}), some_predictions, some_targets, 4).value()));
  EXPECT_EQ(none.value().sum().item<double>(), 0);
  EXPECT_DOUBLE_EQ(f1.value(), (0.8 + 2.0 / 3 + 1) / 3);
}

TEST(ConfusionMatrix, HasARowForEachClass) {
  const auto matrix = with(ConfusionMatrix({.num_classes = 3}), some_predictions, some_targets);
  EXPECT_TRUE(at::equal(matrix.value(), at::tensor({2., 1., 0., 0., 1., 0., 0., 0., 1.}, at::kDouble).view({3, 3})));
  EXPECT_EQ(reduced(std::vector{matrix, matrix}), Json::parse("[[4, 2, 0], [0, 2, 0], [0, 0, 2]]"));
  EXPECT_EQ(reduced(std::vector{matrix, ConfusionMatrix({.num_classes = 3})}, false),
            Json::parse("[[[2, 1, 0], [0, 1, 0], [0, 0, 1]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]]"));
  const auto halves = with(ConfusionMatrix(), classes({0, 1}), classes({0, 0}), 2, numbers({0.5, 1}));
  EXPECT_EQ(reduced(std::vector{halves}), Json::parse("[[0.5, 1], [0, 0]]"));
}

TEST(MeanIoU, IsOfThePixelsOfAllSamples) {
  const auto iou = with(MeanIoU({.num_classes = 4}), some_predictions, some_targets);
  EXPECT_DOUBLE_EQ(iou.value(), (2.0 / 3 + 0.5 + 1) / 3);
  EXPECT_TRUE(std::isnan(iou.per_class()[3]));
  const auto logits = at::one_hot(some_predictions.view({1, 1, 5}), 4).permute({0, 3, 1, 2}).to(at::kFloat);
  EXPECT_EQ(with(MeanIoU({.num_classes = 4}), logits, some_targets.view({1, 1, 5})).value(), iou.value());
}

/// Over all pairs of a sample of class 1 and one of class 0.
double by_pairs(const at::Tensor& score, const at::Tensor& target, const at::Tensor& weight) {
  double won = 0, all = 0;
  for (std::int64_t i = 0; i < score.size(0); ++i)
    for (std::int64_t j = 0; j < score.size(0); ++j) {
      if (target[i].item<int>() != 1 || target[j].item<int>() != 0) continue;
      const double counts = (weight[i] * weight[j]).item<double>();
      const auto mine = score[i].item<double>(), its = score[j].item<double>();
      won += counts * (mine > its ? 1 : mine == its ? 0.5 : 0);
      all += counts;
    }
  return won / all;
}

TEST(AUC, IsThatOfAllPairs) {
  EXPECT_DOUBLE_EQ(with(AUC(), numbers({0.1, 0.4, 0.35, 0.8}), classes({0, 0, 1, 1})).value(), 0.75);
  EXPECT_EQ(with(AUC(), numbers({1, 1, 1, 1}), classes({0, 0, 1, 1})).value(), 0.5) << "ties count half";
  EXPECT_EQ(with(AUC(), numbers({-inf, 0, inf}), classes({0, 0, 1})).value(), 1);
  EXPECT_TRUE(std::isnan(AUC().value()));
  EXPECT_TRUE(std::isnan(with(AUC(), numbers({1, 2}), classes({1, 1})).value()));
  EXPECT_TRUE(std::isnan(with(AUC(), numbers({1, nan, 2}), classes({0, 1, 1})).value()));

  const auto score = at::sin(at::arange(97, at::kDouble) * 3.7).mul(6).round();
  const auto target = at::sin(at::arange(97, at::kDouble) * 1.3).gt(0.2).to(at::kLong);
  const auto weight = at::cos(at::arange(97, at::kDouble)).abs().mul(4).round();
  EXPECT_NEAR(with(AUC(), score, target).value(), by_pairs(score, target, at::ones({97})), 1e-12);
  EXPECT_NEAR(with(AUC(), score, target, std::nullopt, weight).value(), by_pairs(score, target, weight), 1e-12);
  std::vector<AUC> ranks(3);
  ranks[0].add(score.slice(0, 0, 50), target.slice(0, 0, 50));
  ranks[2].add(score.slice(0, 50), target.slice(0, 50));
  EXPECT_NEAR(reduced(ranks).get<double>(), by_pairs(score, target, at::ones({97})), 1e-12);
  EXPECT_NEAR(reduced(std::vector{with(AUC(), numbers({-inf, inf}), classes({0, 1}))}).get<double>(), 1, 0);
  EXPECT_TRUE(reduced(std::vector{with(AUC(), numbers({1, nan}), classes({0, 1}))}).is_null());
}

TEST(Perplexity, IsOfTheMeanOverTokens) {
  const auto logits = at::sin(at::arange(2 * 7 * 3, at::kFloat)).view({2, 7, 3});
  const auto target = classes({0, 1, 2, 3, 4, 6}).view({2, 3});
  const auto loss = at::cross_entropy_loss(logits, target);
  Perplexity perplexity;
  perplexity.add(logits, target);
  EXPECT_NEAR(perplexity.value(), std::exp(loss.item<double>()), 1e-5);
  Perplexity by_loss;
  by_loss.add(loss, 6);
  by_loss.add(at::tensor(nan), 0);
  EXPECT_NEAR(by_loss.value(), perplexity.value(), 1e-5);
  EXPECT_NEAR(with(Perplexity(), at::zeros({4, 50}, at::kBFloat16), classes({0, 9, 3, 49})).value(), 50, 1e-4);
  EXPECT_NEAR(with(Perplexity(), logits, target, 1).value(),
              std::exp(at::cross_entropy_loss(logits.slice(0, 0, 1), target.slice(0, 0, 1)).item<double>()), 1e-5);
  Perplexity hopeless;
  hopeless.add(at::tensor(1e6), 1);
  EXPECT_TRUE(reduced(std::vector{hopeless}).is_null());
}

TEST(SampleMetrics, ASampleWithANaNLogitIsWrong) {
  const auto lost = at::full({4, 3}, nan);
  const auto target = classes({0, 1, 2, 0});
  EXPECT_EQ(with(Accuracy(), lost, target).value(), 0);
  EXPECT_EQ(with(Accuracy({.top_k = 2}), numbers({nan, 1, 2}).view({1, 3}), classes({2})).value(), 0);
  EXPECT_EQ(with(F1({3, Average::micro}), lost, target).value(), 0);
  EXPECT_EQ(with(F1({3, Average::macro}), lost, target).value(), 0);
  EXPECT_EQ(with(MeanIoU({.num_classes = 3}), lost, target).value(), 0);
  EXPECT_EQ(with(ConfusionMatrix({.num_classes = 3}), lost, target).value().diagonal().sum().item<double>(), 0);
  EXPECT_EQ(with(ConfusionMatrix({.num_classes = 3}), lost, target).value().sum().item<double>(), 4) << "it is counted";
  const auto one = numbers({0, 0, 1, nan, 0, 0, 0, 1, 0}).view({3, 3});
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    EXPECT_DOUBLE_EQ(with(F1({3, Average::micro}), one.to(type), classes({2, 0, 1})).value(), 2.0 / 3) << type;
  EXPECT_EQ(with(F1({3, Average::micro}), one, classes({2, 0, 1}), std::nullopt, numbers({1, 0, 1})).value(), 1);
}

TEST(SampleMetrics, WarnOnceOfNaN) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a new process, which has not warned yet
  const auto add_some = [] {
    testing::internal::CaptureStderr();
    for (int i = 0; i < 2; ++i) with(Accuracy(), at::full({1, 2}, nan), classes({0}));
    with(F1(), at::full({1, 2}, nan), classes({0}));
    const auto said = testing::internal::GetCapturedStderr();
    const auto first = said.find("a logit is NaN. Such samples count as wrong");
    std::_Exit(first != said.npos && said.find("a logit is NaN", first + 1) == said.npos ? 0 : 1);
  };
  EXPECT_EXIT(add_some(), testing::ExitedWithCode(0), "");
}

TEST(AUC, ComparesWholeNumbersAsWholeNumbers) {
  constexpr std::int64_t large = std::int64_t{1} << 60, most = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t least : {large, -large, most - 2, std::numeric_limits<std::int64_t>::min()}) {
    std::vector<AUC> ranks(2);
    ranks[0].add(classes({least, least + 2}), classes({0, 1}));
    ranks[1].add(classes({least + 1, least + 1}), classes({0, 1}));
    EXPECT_DOUBLE_EQ(reduced(ranks).get<double>(), 3.5 / 4) << least;
  }
  AUC mixed;
  mixed.add(numbers({0.5, 2.5}), classes({0, 1}));
  mixed.add(classes({1, 2}), classes({1, 0}));
  EXPECT_DOUBLE_EQ(mixed.value(), 3.0 / 4);
  const auto unsigned_scores = classes({-1, -2}).view(at::kUInt64);  // 2^64 - 1 and one less
  EXPECT_EQ(with(AUC(), unsigned_scores, classes({1, 0})).value(), 1);
  EXPECT_EQ(with(AUC(), unsigned_scores, classes({0, 1})).value(), 0);
}

TEST(Perplexity, TakesALossOfAnyShape) {
  Perplexity perplexity;
  perplexity.add(numbers({1, 3}).view({2, 1}), 6);
  EXPECT_NEAR(perplexity.value(), std::exp(2.0), 1e-12);
  for (const auto& loss : {at::Tensor(), at::empty({0}), at::ones({1}, at::kComplexFloat)})
    EXPECT_SAYS(refusal([&] { perplexity.add(loss, 1); }), "the loss");
}

TEST(SampleMetrics, AreMadeOfAllRanksCounts) {
  std::vector<Accuracy> ranks(3);
  ranks[0].add(classes({1, 1, 1}), classes({1, 1, 1}));
  ranks[2].add(classes({1}), classes({0}));
  EXPECT_EQ(reduced(ranks), 0.75) << "not the mean of 1 and 0";
  EXPECT_EQ(reduced(ranks, false), (Json{1.0, nullptr, 0.0}));
  const std::vector<Metrics> mixed{{{"m", ranks[0]}}, {{"m", 0.5}}};
  const auto encoded = [](const std::vector<Metrics>& metrics) {
    std::vector<Json> all;
    for (const auto& of_rank : metrics) all.push_back(detail::observe::to_json(of_rank));
    return all;
  };
  EXPECT_SAYS(refusal([&] { mean_over_ranks(encoded(mixed)); }), "plain value");
  EXPECT_SAYS(refusal([&] { mean_over_ranks(encoded({mixed[1], mixed[0]})); }), "plain value");
  EXPECT_SAYS(refusal([&] {
                mean_over_ranks(encoded({{{"m", F1()}}, {{"m", F1({.num_classes = 3, .average = Average::macro})}}}));
              }),
              "on one rank");
  EXPECT_EQ(mean_over_ranks(encoded({{}, {{"m", ranks[0]}}})).at("m"), 1) << "of the ranks that gave it";
}

TEST(SampleMetrics, AreTakenWithWhatTheyHave) {
  const auto expect_taken = [](const auto& fresh, auto metric) {
    const auto before = detail::observe::to_json(Metrics{{"m", metric}});
    EXPECT_EQ(detail::observe::to_json(Metrics{{"m", metric.take()}}), before);
    EXPECT_EQ(detail::observe::to_json(Metrics{{"m", metric}}).dump(),
              detail::observe::to_json(Metrics{{"m", fresh}}).dump());
  };
  const auto prediction = classes({1, 0, 1}), target = classes({1, 1, 0});
  expect_taken(Accuracy(), with(Accuracy(), prediction, target));
  expect_taken(F1(), with(F1(), prediction, target));
  expect_taken(ConfusionMatrix(), with(ConfusionMatrix(), prediction, target));
  expect_taken(MeanIoU(), with(MeanIoU(), prediction, target));
  expect_taken(AUC(), with(AUC(), numbers({0.1, 0.7, 0.3}), target));
  expect_taken(Perplexity(), with(Perplexity(), at::ones({3, 2}), target));
}

TEST(SampleMetrics, RefuseWhatDoesNotFit) {
  Accuracy accuracy;
  const auto refused = [&](const at::Tensor& prediction, const at::Tensor& target) {
    return refusal([&] { accuracy.add(prediction, target); });
  };
  EXPECT_SAYS(refused(classes({0, 1}), numbers({0, 1})), "the target is of the type");
  EXPECT_SAYS(refused(classes({0, 1}), classes({0})), "shape");
  EXPECT_SAYS(refused(at::zeros({2, 3, 4}), classes({0, 1})), "shape");
  EXPECT_SAYS(refused(at::zeros({}), at::zeros({}, at::kLong)), "shape");
  EXPECT_SAYS(refused(at::zeros({2, 3}), classes({0, 3})), "has the class 3, and there are 3");
  EXPECT_SAYS(refused(at::zeros({2, 3}), classes({0, -1})), "has the class -1");
  EXPECT_SAYS(refused(numbers({0.2, 0.4}), classes({0, 1})), "logits.gt(0)");
  EXPECT_SAYS(refusal([&] { accuracy.add(classes({0}), classes({0}), 2); }), "2 samples");
  EXPECT_SAYS(refusal([&] {
                accuracy.add(classes({0}), classes({0}), 1, numbers({1, 2}));
              }),
              "the weight has the shape");
  const auto without_a_class = classes({0, 1, -100, -100});
  EXPECT_SAYS(refused(classes({0, 1, 1, 0}), without_a_class), "a target has the class -100. Classes are numbered");
  EXPECT_SAYS(refused(classes({0, -1}), classes({0, 1})), "a prediction has the class -1");
  for (const double weight : {-1.0, std::nan(""), static_cast<double>(INFINITY)})
    EXPECT_SAYS(refusal([&] {
                  accuracy.add(classes({0, 1}), classes({0, 1}), {}, numbers({1, weight}));
                }),
                "a weight is negative or not a finite number");
  EXPECT_TRUE(std::isnan(accuracy.value())) << "what is refused counts nothing";
  accuracy.add(classes({0, 1, 1, 0}), without_a_class, {}, without_a_class.ne(-100));
  EXPECT_EQ(accuracy.value(), 1);
  F1 f1;
  EXPECT_SAYS(refusal([&] { f1.add(at::zeros({1, 3}), classes({0})); }), "logits are of 3 classes");
  EXPECT_SAYS(refusal([&] { f1.add(classes({2}), classes({0})); }), "a prediction has the class 2");
  EXPECT_SAYS(refusal([&] { f1.add(numbers({0.5}), classes({0})); }), "of the type");
  for (const auto type : {at::kLong, at::kBool, at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn})
    for (const auto& metric : std::vector<std::function<void(const at::Tensor&, const at::Tensor&)>>{
             [](const auto&a, const auto&b) { Accuracy().add(a, b); },
             [](const auto&a, const auto&b) { Accuracy({.top_k = 2}).add(a, b); },
             [](const auto&a, const auto&b) {
               F1({3, Average::macro}).add(a, b);
             },
             [](const auto&a, const auto&b) { ConfusionMatrix({.num_classes = 3}).add(a, b); },
             [](const auto&a, const auto&b) { MeanIoU({.num_classes = 3}).add(a, b); },
             [](const auto&a, const auto&b) { Perplexity().add(a, b); }})
      EXPECT_SAYS(refusal([&] { metric(at::zeros({2, 3}).to(type), classes({0, 1})); }), "the logits are of the type");
  EXPECT_SAYS(refusal([] { AUC().add(at::ones({2}, at::kComplexFloat), classes({0, 1})); }), "of the type");
  EXPECT_SAYS(refusal([] { Accuracy().add(at::ones({2}, at::kComplexFloat), classes({0, 1})); }), "of the type");
  EXPECT_SAYS(refused(classes({0, 1}), classes({0, 1}).to(at::kComplexFloat)), "the target is of the type");
  EXPECT_SAYS(refused({}, classes({0})), "undefined");
  EXPECT_SAYS(refused(classes({0}), {}), "undefined");
  EXPECT_SAYS(refusal([&] {
                accuracy.add(classes({0, 1}), classes({0, 1}), {}, at::ones({2}, at::kComplexFloat));
              }),
              "the weight is a complex number");
  for (const auto type : {at::kUInt16, at::kUInt32, at::kUInt64}) {
    EXPECT_EQ(with(Accuracy(), classes({0, 1}).to(type), classes({0, 0}).to(type)).value(), 0.5) << type;
    EXPECT_EQ(with(Accuracy(), numbers({0, 1, 1, 0}).view({2, 2}), classes({1, 1}).to(type)).value(), 0.5) << type;
    EXPECT_EQ(with(F1({2, Average::micro}), classes({0, 1}).to(type), classes({0, 0}).to(type)).value(), 0.5) << type;
    EXPECT_EQ(with(AUC(), classes({0, 1}).to(type), classes({0, 1}).to(type)).value(), 1) << type;
  }
  AUC auc;
  EXPECT_SAYS(refusal([&] { auc.add(at::zeros({1, 2}), classes({0})); }), "select(1, 1)");
  EXPECT_SAYS(refusal([&] { auc.add(numbers({0.5}), classes({2})); }), "the class 2");
  Perplexity perplexity;
  EXPECT_SAYS(refusal([&] { perplexity.add(classes({0}), classes({0})); }), "logits");
  Accuracy top({.top_k = 2});
  EXPECT_SAYS(refusal([&] { top.add(classes({0}), classes({0})); }), "top_k is 2");
  EXPECT_SAYS(refusal([] { Accuracy({.top_k = 0}); }, ExitCode::usage), "top_k");
  EXPECT_SAYS(refusal([] { F1({.num_classes = 3}); }, ExitCode::usage), "Average::binary");
  EXPECT_SAYS(refusal([] { MeanIoU({.num_classes = 0}); }, ExitCode::usage), "num_classes");
  EXPECT_SAYS(refusal([] { ConfusionMatrix({.num_classes = -1}); }, ExitCode::usage), "num_classes");
}

/// Saved by two ranks, and what each of `ranks` has of it.
template <class M>
std::vector<M> regrouped(const std::vector<M>& saved, const M& fresh, int ranks) {
  Json all = Json::array();
  for (auto metric : saved) all.push_back(detail::state::collect({{"m", metric}}).values.at("m"));
  const StateDict state{.values = {{"m", Json::parse(all.dump())}}};
  std::vector<M> restored(static_cast<std::size_t>(ranks), fresh);
  for (int rank = 0; rank < ranks; ++rank)
    detail::state::restore({{"m", restored[static_cast<std::size_t>(rank)]}}, state, {rank, ranks});
  return restored;
}

TEST(SampleMetrics, AreSavedByRankAndCountOnceAtAnyNumber) {
  const F1 f1({.num_classes = 4, .average = Average::macro});
  const std::vector<F1> two{with(f1, some_predictions, some_targets), with(f1, classes({3, 3}), classes({3, 0}))};
  const std::vector<AUC> scores{with(AUC(), numbers({0.25, inf, 0.5}), classes({0, 1, 1})),
                                with(AUC(), numbers({0.1, 0.25}), classes({1, 0}))};
  for (const int ranks : {1, 2, 3}) {
    const auto restored = regrouped(two, f1, ranks);
    EXPECT_EQ(reduced(restored), reduced(two)) << ranks;
    EXPECT_EQ(reduced(regrouped(scores, AUC(), ranks)), reduced(scores)) << ranks;
    if (ranks == 2) {
      EXPECT_EQ(restored[1].value(), two[1].value());
    }
    if (ranks == 3) {
      EXPECT_TRUE(std::isnan(restored[2].value()));
    }
  }
  const std::vector<F1> others{F1({.num_classes = 3, .average = Average::macro})};
  for (const int ranks : {1, 2}) {
    try {
      regrouped(others, f1, ranks);
      ADD_FAILURE() << "three classes for four";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_SAYS(std::string(error.what()), "\"num_classes\":3");
    }
  }
}

}  // namespace
}  // namespace muster::classification_test
