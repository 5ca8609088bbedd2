#include "muster/preprocessor.hpp"

#include "muster/error.hpp"
#include "support/world.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace muster::preprocessor_test {
namespace {

using test::world;

Batch all_of(const Dataset& dataset) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(dataset.count()));
  std::iota(samples.begin(), samples.end(), 0);
  return dataset.read(samples);
}

Batch fitted(const PreprocessorPtr& preprocessor, const Dataset& dataset) {
  preprocessor->fit(dataset, world());
  return all_of(dataset.transform(preprocessor));
}

/// Another of the same kind, given the state as a file would hold it.
void expect_restores(const PreprocessorPtr& from, const PreprocessorPtr& to, const Dataset& dataset) {
  to->load_state(Json::parse(from->state().dump()));
  const auto want = all_of(dataset.transform(from)), got = all_of(dataset.transform(to));
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(tensor, got[name])) << name;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// More samples than one batch of the fit, fewer than ranks, and what does not divide.
class Sizes : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Preprocessors, Sizes, testing::Values(1, 2, 3, 10, 1000, 1537));

TEST_P(Sizes, StandardScaler) {
  const auto n = GetParam();
  // Far from zero, where sums of squares would lose everything.
  const auto x = (at::arange(3 * n, at::kDouble).view({n, 3}) * at::arange(3)).sin() + 1e6;
  const Dataset dataset = Dataset::from_tensors({{"x", x}, {"s", (at::arange(n) % 7).to(at::kByte)}});
  const auto scaler = standard_scaler({"x", "s"});
  const auto batch = fitted(scaler, dataset);
  const auto mean = x.mean(0), deviation = x.std(0, /*unbiased=*/false);
  const auto scale = at::where(deviation < 1e-6, at::full({3}, 1.0, at::kDouble), deviation);
  EXPECT_TRUE(at::allclose(batch["x"], (x - mean) / scale, 1e-6, 1e-6));
  EXPECT_TRUE(at::equal(batch["x"].select(1, 0), at::zeros({n}, at::kDouble))) << "a feature that never changes";
  EXPECT_EQ(batch["x"].scalar_type(), at::kDouble);
  EXPECT_EQ(batch["s"].scalar_type(), at::kFloat);
  EXPECT_NEAR(batch["s"].mean().item<float>(), 0, 1e-5);
  expect_restores(scaler, standard_scaler({"x", "s"}), dataset);
}

TEST(Preprocessors, StandardScalerScalesSmallDeviationsFarFromZero) {
  // Seconds since 1970, a millisecond apart.
  const auto x = 1.7e9 + at::arange(40, at::kDouble).remainder(3) * 1e-3;
  const auto batch = fitted(standard_scaler({"x"}), Dataset::from_tensors({{"x", x}}));
  EXPECT_TRUE(at::allclose(batch["x"], (x - x.mean()) / x.std(0, /*unbiased=*/false), 1e-3, 1e-3));
}

TEST(Preprocessors, StandardScalerScalesWhatSquaresCannotHold) {
  const auto expect_scaled = [](const at::Tensor& x, const at::Tensor& wanted) {
    const auto batch = fitted(standard_scaler({"x"}), Dataset::from_tensors({{"x", x}}));
    EXPECT_TRUE(at::allclose(batch["x"], wanted, 1e-12, 1e-12)) << x << batch["x"];
  };
  const auto pattern = at::arange(1000, at::kDouble).remainder(2);  // in several blocks, which are joined
  for (const double size : {1e-310, 1e-200, 1e200, 1e307}) {
    expect_scaled(at::tensor({size, 3 * size}, at::kDouble), at::tensor({-1.0, 1.0}, at::kDouble));
    expect_scaled(at::tensor({size, -size}, at::kDouble), at::tensor({1.0, -1.0}, at::kDouble));
    expect_scaled((2 * pattern - 1) * size, 2 * pattern - 1);
  }
}

TEST(Preprocessors, ScaleWhatAFloatCannotHold) {
  const auto expect_scaled = [](const PreprocessorPtr& scaler, const at::Tensor& x, const at::Tensor& wanted) {
    const auto batch = fitted(scaler, Dataset::from_tensors({{"x", x}}));
    EXPECT_EQ(batch["x"].scalar_type(), x.scalar_type());
    EXPECT_TRUE(at::allclose(batch["x"].to(at::kDouble), wanted, 1e-3, 1e-3)) << x << batch["x"];
  };
  const auto ends = at::tensor({0.0, 1.0}, at::kDouble), both = at::tensor({-1.0, 1.0}, at::kDouble);
  for (const auto type : {at::kFloat, at::kBFloat16})
    for (const double size : {3e38, 1e-40}) {
      const auto x = (both * size).to(type);
      expect_scaled(min_max_scaler({"x"}), x, ends);
      expect_scaled(standard_scaler({"x"}), x, both);
    }
  for (const double size : {1.7e308, 5e-324}) {
    expect_scaled(min_max_scaler({"x"}), both * size, ends);
    expect_scaled(standard_scaler({"x"}), both * size, both);
  }
}

TEST_P(Sizes, MinMaxScaler) {
  const auto n = GetParam();
  const auto x = at::arange(2 * n, at::kFloat).view({n, 1, 2}) - 5;
  const auto dataset = Dataset::from_tensors({{"x", x}, {"c", at::full({n}, 3)}});
  const auto scaler = min_max_scaler({"x", "c"});
  const auto batch = fitted(scaler, dataset);
  const auto want = n > 1 ? at::arange(n, at::kFloat) / (n - 1) : at::zeros({1});
  for (const int feature : {0, 1}) EXPECT_TRUE(at::allclose(batch["x"].select(2, feature).select(1, 0), want));
  EXPECT_TRUE(at::equal(batch["c"], at::zeros({n})));
  expect_restores(scaler, min_max_scaler({"x", "c"}), dataset);
}

TEST_P(Sizes, Encoders) {
  const auto n = GetParam();
  const auto labels = 10 - 3 * (at::arange(n) % 4);  // 10, 7, 4, 1, 10, …
  const auto dataset = Dataset::from_tensors({{"y", labels.to(at::kInt)}, {"z", labels}});
  const auto encoder = chain({label_encoder("y"), one_hot_encoder({"z"})});
  const auto batch = fitted(encoder, dataset);
  const auto k = std::min<std::int64_t>(4, n);
  const auto codes = (k - 1) - (at::arange(n) % 4);
  EXPECT_TRUE(at::equal(batch["y"], codes)) << batch["y"];
  EXPECT_EQ(batch["z"].sizes().vec(), (std::vector<std::int64_t>{n, k}));
  EXPECT_TRUE(at::equal(batch["z"].argmax(1), codes));
  EXPECT_TRUE(at::equal(batch["z"].sum(1), at::full({n}, 1.F)));
  expect_restores(encoder, chain({label_encoder("y"), one_hot_encoder({"z"})}), dataset);

  const auto other = Dataset::from_tensors({{"y", at::full({1}, 10)}, {"z", at::full({1}, 5)}});
  EXPECT_TRUE(at::equal(all_of(other.transform(encoder))["z"], at::zeros({1, k}))) << "a value that was not seen";
  const auto bad = Dataset::from_tensors({{"y", at::full({1}, 99)}, {"z", at::full({1}, 5)}});
  const auto text = error_of([&] { all_of(bad.transform(encoder)); });
  EXPECT_TRUE(contains(text, "99") && contains(text, "\"y\"")) << text;
}

TEST_P(Sizes, AChainFitsEachOnWhatComesBefore) {
  const auto n = GetParam();
  const auto dataset = Dataset::from_tensors({{"x", at::arange(n, at::kFloat) * 4}});
  const auto batch = fitted(chain({min_max_scaler({"x"}), standard_scaler({"x"})}), dataset);
  const auto x = at::arange(n, at::kDouble);
  const auto deviation = n > 1 ? x.std(0, false) : at::full({}, 1.0, at::kDouble);
  EXPECT_TRUE(at::allclose(batch["x"].to(at::kDouble), (x - x.mean()) / deviation, 1e-4, 1e-5));
}

TEST(Preprocessors, RefuseAColumnThatIsNamedTwice) {
  const auto text = error_of([] { standard_scaler({"x", "y", "x"}); });
  EXPECT_TRUE(contains(text, "\"x\" is named twice")) << text;
  error_of([] { min_max_scaler({"x", "x"}); });
  error_of([] { one_hot_encoder({"x", "x"}); });
}

TEST(Preprocessors, LearnTheSameOnEveryRank) {
  const auto dataset = Dataset::from_tensors({{"x", at::arange(999, at::kDouble).sin()}});
  const auto scaler = standard_scaler({"x"});
  scaler->fit(dataset, world());
  for (const auto& state : world().all_gather(scaler->state().dump())) EXPECT_EQ(state, scaler->state().dump());
}

TEST(Preprocessors, LearnTheSameBitsAtAnyNumberOfRanks) {
  const auto alone = world().split(world().rank());
  for (const std::int64_t rows : {1, 255, 257, 1000, 1537, 5003}) {
    const auto angles = at::arange(3 * rows, at::kDouble).view({rows, 3});
    const auto dataset = Dataset::from_tensors({{"x", angles.sin() * 1e3 + 0.1},
                                                {"f", (angles.cos() * 7).to(at::kFloat).view({rows, 3, 1})},
                                                {"y", at::arange(rows) % 11}});
    const auto make = [] {
      return chain({standard_scaler({"x", "f"}), min_max_scaler({"x"}), standard_scaler({"x"}), label_encoder("y")});
    };
    const auto by_all = make(), by_one = make();
    by_all->fit(dataset, world());
    by_one->fit(dataset, alone);
    EXPECT_EQ(by_all->state().dump(), by_one->state().dump()) << rows;
  }
}

TEST(Preprocessors, EncodersRefuseWhatIsNoClass) {
  const auto fitted_on = Dataset::from_tensors({{"y", at::arange(4)}});
  for (const auto& encoder : {label_encoder("y"), one_hot_encoder({"y"})}) {
    encoder->fit(fitted_on, world());
    const auto text_of = [&](const at::Tensor& labels) {
      return error_of([&] { all_of(Dataset::from_tensors({{"y", labels}}).transform(encoder)); });
    };
    const auto text = text_of(at::tensor({1.0, 2.7}, at::kDouble));
    EXPECT_TRUE(contains(text, "2.7") && contains(text, "\"y\"") && contains(text, "no whole number")) << text;
    EXPECT_TRUE(contains(text_of(at::tensor({std::nan("")})), "no whole number"));
    EXPECT_TRUE(contains(text_of(at::tensor({1e30F})), "no whole number"));
    const auto whole = Dataset::from_tensors({{"y", at::tensor({2.F, 0.F})}}).transform(encoder);
    EXPECT_TRUE(at::equal(all_of(whole)["y"],
                          all_of(Dataset::from_tensors({{"y", at::tensor({2, 0})}}).transform(encoder))["y"]));
  }
}

TEST(Preprocessors, KeepNarrowTypes) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    const auto dataset = Dataset::from_tensors({{"x", at::tensor({1.F, 2.F, 3.F}).to(type)}});
    const auto x = fitted(min_max_scaler({"x"}), dataset)["x"];
    EXPECT_EQ(x.scalar_type(), type);
    EXPECT_TRUE(at::equal(x.to(at::kFloat), at::tensor({0.F, 0.5F, 1.F})));
  }
}

TEST(Preprocessors, ErrorsNameTheColumn) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto dataset = Dataset::from_tensors({{"x", at::tensor({1.0, nan, 2.0, 3.0})}, {"y", at::arange(4)}});
  const auto fit = [&](const PreprocessorPtr& preprocessor) {
    return error_of([&] { preprocessor->fit(dataset, world()); });
  };
  for (const auto& text : {fit(standard_scaler({"y", "x"})), fit(min_max_scaler({"x"}))})
    EXPECT_TRUE(contains(text, "\"x\"") && contains(text, "NaN")) << text;
  const auto missing = fit(label_encoder("z"));
  EXPECT_TRUE(contains(missing, "\"z\"") && contains(missing, "x, y")) << missing;
  EXPECT_TRUE(contains(fit(one_hot_encoder({"x"})), "integers"));
  const auto unfitted = error_of([&] { all_of(dataset.transform(standard_scaler({"y"}))); });
  EXPECT_TRUE(contains(unfitted, "\"y\"") && contains(unfitted, "not been fitted")) << unfitted;
  EXPECT_TRUE(contains(error_of([] { standard_scaler({}); }), "no columns"));
}

TEST(Preprocessors, RefuseTheStateOfAnother) {
  const auto dataset = Dataset::from_tensors({{"x", at::arange(8, at::kFloat).view({4, 2})}, {"y", at::arange(4)}});
  const auto scaler = standard_scaler({"x"});
  scaler->fit(dataset, world());
  const auto load = [&](const PreprocessorPtr& other) { return error_of([&] { other->load_state(scaler->state()); }); };
  EXPECT_TRUE(contains(load(min_max_scaler({"x"})), "standard_scaler was saved"));
  EXPECT_TRUE(contains(load(standard_scaler({"y"})), "\"y\""));
  EXPECT_TRUE(contains(load(chain({scaler})), "chain"));
  const auto pair = chain({scaler, scaler});
  EXPECT_TRUE(contains(error_of([&] { chain({scaler})->load_state(pair->state()); }), "1 steps, 2"));
  const auto narrow = Dataset::from_tensors({{"x", at::zeros({2, 3})}});
  EXPECT_TRUE(contains(error_of([&] { all_of(narrow.transform(scaler)); }), "2 features, but is applied to 3"));
}

}  // namespace
}  // namespace muster::preprocessor_test
