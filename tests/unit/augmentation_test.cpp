#include "muster/augmentation.hpp"

#include "muster/error.hpp"
#include "support/errors.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace muster::augmentation_test {
namespace {

using test::error_of;

using Sizes = std::vector<std::int64_t>;

at::Generator generator_of(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

/// Applies the preprocessor with the generator of `seed`.
Batch applied(const PreprocessorPtr& preprocessor, Batch batch, std::uint64_t seed) {
  auto generator = generator_of(seed);
  preprocessor->transform(batch, generator);
  return batch;
}

/// Different values in every place.
at::Tensor counted(const Sizes& shape, at::ScalarType type) {
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  return ((at::arange(count) * 37 + 1) % 101).view(shape).to(type);
}

void expect_refusal(const PreprocessorPtr& preprocessor, const Batch& batch, const std::string& text) {
  EXPECT_EQ(error_of([&] { applied(preprocessor, batch, 0); }, ExitCode::data), text);
}

// More deviations than a right program exceeds once in 1e9 runs, for each of a thousand numbers.
constexpr double most_deviations = 7.5;

struct Crop {
  Sizes shape;  ///< of the batch
  Sizes sizes;
  std::int64_t padding;
};

/// The value at `place` of the cropped dimensions, which count from the end; 0 in the padding.
double value_at(at::Tensor plane, const Sizes& place) {
  for (const auto at : place) {
    if (at < 0 || at >= plane.size(0)) return 0;
    plane = plane[at];
  }
  return plane.item<double>();
}

/// A plain crop of each sample of `x`, at first[d][i] in dimension d of sample i.
void expect_cropped(const at::Tensor& x, const at::Tensor& have, const Crop& crop,
                    const std::vector<at::Tensor>& first) {
  const auto cropped = static_cast<std::int64_t>(crop.sizes.size()), lead = x.dim() - cropped;
  Sizes shape(crop.shape.begin(), crop.shape.begin() + lead);
  shape.insert(shape.end(), crop.sizes.begin(), crop.sizes.end());
  ASSERT_EQ(have.sizes().vec(), shape);
  ASSERT_EQ(have.scalar_type(), x.scalar_type());
  const auto planes = x.flatten(0, lead - 1), boxes = have.flatten(0, lead - 1);
  const auto planes_per_sample = planes.size(0) / x.size(0);
  for (std::int64_t p = 0; p < planes.size(0); ++p) {
    const auto values = boxes[p].flatten().to(at::kDouble);
    for (std::int64_t v = 0; v < values.size(0); ++v) {
      Sizes place(crop.sizes.size());
      for (std::int64_t d = cropped - 1, rest = v; d >= 0; --d) {
        const auto k = static_cast<std::size_t>(d);
        place[k] = rest % crop.sizes[k] + first[k][p / planes_per_sample].item<std::int64_t>() - crop.padding;
        rest /= crop.sizes[k];
      }
      ASSERT_EQ(values[v].item<double>(), value_at(planes[p], place)) << "plane " << p << ", value " << v;
    }
  }
}

TEST(RandomCrop, CutsABoxOfEachSample) {
  const std::vector<Crop> crops{{{5, 9}, {4}, 0},       {{4, 3, 7, 6}, {5, 6}, 0},    {{3, 2, 5, 5}, {5, 5}, 2},
                                {{6, 4, 4}, {7, 2}, 2}, {{2, 3, 4, 5}, {2, 3, 6}, 1}, {{1, 1, 1}, {1}, 0},
                                {{3, 2, 4}, {10}, 3}};
  std::uint64_t seed = 0;
  for (const auto& crop : crops)
    for (const auto type : {at::kFloat, at::kByte, at::kLong, at::kBool, at::kHalf, at::kDouble}) {
      const auto x = counted(crop.shape, type);
      const auto batch = applied(random_crop({"x"}, crop.sizes, crop.padding), Batch({{"x", x}}), ++seed);
      auto generator = generator_of(seed);
      std::vector<at::Tensor> first;
      for (std::size_t d = 0; d < crop.sizes.size(); ++d) {
        const auto size = crop.shape[crop.shape.size() - crop.sizes.size() + d];
        first.push_back(
            at::randint(size + 2 * crop.padding - crop.sizes[d] + 1, {crop.shape[0]}, generator, at::kLong));
      }
      expect_cropped(x, batch["x"], crop, first);
    }
}

TEST(RandomCrop, IsTheSameForColumnsThatAreNamedTogether) {
  const auto mask = counted({40, 8, 9}, at::kLong);
  const auto image = (mask.unsqueeze(1) * at::arange(1, 4).view({3, 1, 1})).to(at::kFloat);
  const Batch before({{"image", image}, {"mask", mask}, {"y", at::arange(40)}});
  const auto batch = applied(random_crop({"image", "mask"}, {5, 4}, 1), before, 3);
  for (const int channel : {0, 1, 2})
    EXPECT_TRUE(at::equal(batch["image"].select(1, channel).to(at::kLong), batch["mask"] * (channel + 1)));
  EXPECT_TRUE(at::equal(batch["y"], at::arange(40)));
  EXPECT_TRUE(at::equal(before["mask"], mask)) << "the dataset's own values stay";
}

TEST(RandomCrop, EachPlaceIsAsLikely) {
  // A sample whose value is its place, and crops of one value: 5 × 5 places with the padding.
  constexpr std::int64_t rows = 100'000, places = 25;
  const auto x = at::arange(1, 10).view({1, 3, 3}).expand({rows, 3, 3});
  const auto values = applied(random_crop({"x"}, {1, 1}, 1), Batch({{"x", x}}), 11)["x"].flatten();
  std::map<std::int64_t, std::int64_t> counts;
  for (std::int64_t i = 0; i < rows; ++i) ++counts[values.const_data_ptr<std::int64_t>()[i]];
  const auto expect_share = [&](std::int64_t count, double share) {
    EXPECT_LE(std::abs(static_cast<double>(count) - rows * share),
              most_deviations * std::sqrt(rows * share * (1 - share)));
  };
  expect_share(counts[0], 16.0 / places);
  for (std::int64_t place = 1; place <= 9; ++place) expect_share(counts[place], 1.0 / places);
}

TEST(RandomCrop, RefusesOtherShapes) {
  const Batch batch({{"x", at::zeros({2, 3, 8, 6})}, {"y", at::zeros({2})}, {"m", at::zeros({2, 8, 7})}});
  expect_refusal(
      random_crop({"y"}, {2}), batch,
      "applying random_crop to column \"y\": its samples have the shape [], and the crop [2]. Give a size for "
      "each of the last dimensions of a sample");
  expect_refusal(
      random_crop({"x"}, {8, 9}, 1), batch,
      "applying random_crop to column \"x\": the crop [8, 9] is larger than a sample, [8, 6] with padding 1. "
      "Give smaller sizes or more padding");
  expect_refusal(
      random_crop({"x", "m"}, {4, 4}), batch,
      "applying random_crop to column \"m\": it is cropped in dimensions of [8, 7], but \"x\" of [8, 6]. Name "
      "columns together that have the same sizes there");
  EXPECT_NE(error_of([&] { applied(random_crop({"z"}, {1}), batch, 0); }, ExitCode::data).find("no column \"z\""),
            std::string::npos);
}

TEST(RandomFlip, ReversesWholeSamples) {
  std::uint64_t seed = 0;
  for (const auto type : {at::kFloat, at::kByte, at::kBool, at::kHalf})
    for (const std::int64_t dimension : {-1, -2, -3, 0, 1, 2})
      for (const double probability : {0.0, 0.3, 1.0}) {
        const auto x = counted({20, 2, 3, 4}, type);
        const auto have = applied(random_flip({"x"}, dimension, probability), Batch({{"x", x}}), ++seed)["x"];
        auto generator = generator_of(seed);
        const auto draws = at::rand({20}, generator, at::kDouble);
        ASSERT_EQ(have.sizes(), x.sizes());
        EXPECT_EQ(have.scalar_type(), type);
        for (std::int64_t i = 0; i < 20; ++i) {
          const auto axis = dimension < 0 ? dimension + 3 : dimension;
          const auto size = x.size(axis + 1);
          const bool flips = draws[i].item<double>() < probability;
          for (std::int64_t j = 0; j < size; ++j)
            EXPECT_TRUE(at::equal(have[i].select(axis, j), x[i].select(axis, flips ? size - 1 - j : j)));
        }
      }
}

TEST(RandomFlip, IsTheSameForColumnsThatAreNamedTogether) {
  const auto mask = counted({200, 4, 5}, at::kLong);
  const Batch before({{"image", mask.unsqueeze(1).expand({200, 3, 4, 5})}, {"mask", mask}});
  const auto batch = applied(random_flip({"image", "mask"}), before, 5);
  for (const int channel : {0, 1, 2}) EXPECT_TRUE(at::equal(batch["image"].select(1, channel), batch["mask"]));
  EXPECT_FALSE(at::equal(batch["mask"], mask));
}

TEST(RandomFlip, ComesWithItsProbability) {
  constexpr std::int64_t rows = 200'000;
  for (const double probability : {0.1, 0.5, 0.9}) {
    const auto x = at::arange(2).view({1, 2}).expand({rows, 2});
    const auto flipped = applied(random_flip({"x"}, 0, probability), Batch({{"x", x}}), 21)["x"].select(1, 0).sum();
    EXPECT_LE(std::abs(flipped.item<double>() - rows * probability),
              most_deviations * std::sqrt(rows * probability * (1 - probability)));
  }
}

TEST(RandomFlip, RefusesAMissingDimension) {
  const Batch batch({{"x", at::zeros({2, 3, 8})}});
  for (const std::int64_t dimension : {2, -3})
    expect_refusal(random_flip({"x"}, dimension), batch,
                   "applying random_flip to column \"x\": its samples have the shape [3, 8], without dimension " +
                       std::to_string(dimension) + ". Name a dimension of a sample");
}

TEST(RandomNoise, AddsADrawToEachValue) {
  std::uint64_t seed = 0;
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const double deviation : {0.0, 0.25, 3.0}) {
      const auto x = counted({7, 3, 2}, type), z = counted({7}, type);
      const auto batch = applied(random_noise({"x", "z"}, deviation), Batch({{"x", x}, {"z", z}}), ++seed);
      auto generator = generator_of(seed);
      const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
      for (const auto& [before, name] : {std::pair{x, "x"}, std::pair{z, "z"}}) {
        const auto draws = at::randn(before.sizes(), generator, wide).flatten();
        const auto have = batch[name].flatten(), had = before.flatten();
        ASSERT_EQ(batch[name].sizes(), before.sizes());
        EXPECT_EQ(have.scalar_type(), type);
        for (std::int64_t i = 0; i < had.numel(); ++i)
          EXPECT_TRUE(at::equal(have[i], had[i] + (draws[i] * deviation).to(type))) << name << " " << i;
      }
    }
}

TEST(RandomNoise, HasTheMomentsOfAGaussian) {
  constexpr double count = 1'000'000, deviation = 0.5;
  const Batch batch({{"x", at::ones({1000, 1000}, at::kDouble)}});
  const auto z = (applied(random_noise({"x"}, deviation), batch, 31)["x"] - 1) / deviation;
  // The mean of z^k, and the variance of z^k.
  const std::vector<std::pair<double, double>> moments{{0, 1}, {1, 2}, {0, 15}, {3, 96}};
  for (std::size_t k = 1; k <= moments.size(); ++k) {
    const auto [mean, variance] = moments[k - 1];
    EXPECT_NEAR(z.pow(static_cast<double>(k)).mean().item<double>(), mean,
                most_deviations * std::sqrt(variance / count))
        << "moment " << k;
  }
}

TEST(RandomNoise, RefusesIntegers) {
  expect_refusal(
      random_noise({"x"}, 1), Batch({{"x", at::arange(3)}}),
      "applying random_noise to column \"x\": it holds Long values. Convert it to floats before, or name other "
      "columns");
}

TEST(Augmentation, RefusesBadOptions) {
  const auto nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::function<void()>, std::string>> bad{
      {[] { random_crop({}, {1}); }, "making a random_crop: it has no columns. Name at least one"},
      {[] {
         random_flip({"x", "y", "x"});
       },
       "making a random_flip: column \"x\" is named twice. Name each column once"},
      {[] { random_crop({"x"}, {}); },
       "making a random_crop: there are no sizes. Give the size of each of the last dimensions"},
      {[] {
         random_crop({"x"}, {2, 0});
       },
       "making a random_crop: a size is less than 1. Give at least 1"},
      {[] { random_crop({"x"}, {2}, -1); }, "making a random_crop: padding is negative. Give at least 0"},
      {[] { random_flip({"x"}, -1, 1.5); },
       "making a random_flip: the probability is not between 0 and 1. Give a number from 0 to 1"},
      {[=] { random_flip({"x"}, -1, nan); },
       "making a random_flip: the probability is not between 0 and 1. Give a number from 0 to 1"},
      {[] { random_noise({"x"}, -0.1); },
       "making a random_noise: the deviation is negative or not finite. Give a number of at least 0"},
      {[=] { random_noise({"x"}, infinity); },
       "making a random_noise: the deviation is negative or not finite. Give a number of at least 0"},
  };
  for (const auto& [make, text] : bad) EXPECT_EQ(error_of(make, ExitCode::usage), text);
}

TEST(Augmentation, HasAStateAndNeedsNoFitting) {
  const auto make = [](double deviation) {
    return chain({random_crop({"x"}, {3}, 1), random_flip({"x"}), random_noise({"x"}, deviation)});
  };
  const auto saved = Json::parse(make(0.5)->state().dump());
  const auto same = make(0.5);
  EXPECT_TRUE(same->fitted());
  same->load_state(saved);
  EXPECT_EQ(same->state(), saved);
  const auto text = error_of([&] { make(0.25)->load_state(saved); }, ExitCode::data);
  EXPECT_EQ(
      text,
      "restoring a preprocessor: {\"columns\":[\"x\"],\"kind\":\"random_noise\",\"options\":{\"deviation\":0.25}} was "
      "asked for, but {\"columns\":[\"x\"],\"kind\":\"random_noise\",\"options\":{\"deviation\":0.5}} was saved. Build "
      "the same preprocessor as the run that was saved");
}

TEST(Augmentation, OfADatasetHasItsSchema) {
  const auto dataset = Dataset::from_tensors({{"x", at::zeros({6, 3, 8, 8})}, {"y", at::arange(6)}})
                           .transform(chain({random_crop({"x"}, {5, 4}), random_flip({"x"})}));
  EXPECT_EQ(dataset.schema(), (Schema{{"x", at::kFloat, {3, 5, 4}}, {"y", at::kLong, {}}}));
  EXPECT_EQ(dataset.count(), 6);
}

}  // namespace
}  // namespace muster::augmentation_test
