#include "data/sources/source.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"
#include "support/hdf5_fixture.hpp"
#include "unit/pass_world.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace muster::detail::data::subset_test {
namespace {

using namespace pass_world;

Samples column_y(const Dataset& data) {
  const auto y = data.column("y");
  return {y.const_data_ptr<std::int64_t>(), y.const_data_ptr<std::int64_t>() + y.numel()};
}

template <class Use>
std::string refused(Use&& use, ExitCode code = ExitCode::usage) {
  try {
    use();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

struct Twice : Preprocessor {
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override { batch.set("y", batch["y"] * 2); }
  Json state() const override { return {}; }
  void load_state(const Json&) override {}
};

TEST(Subset, HasTheSamplesOfItsListInOrder) {
  const Samples list{7, 0, 9, 7, 3};
  const auto subset = numbers(10).subset(list);
  EXPECT_EQ(subset.count(), 5);
  EXPECT_EQ(subset.schema(), numbers(10).schema());
  EXPECT_EQ(column_y(subset), list);
  const auto some = subset.read(std::vector<std::int64_t>{4, 0, 0});
  EXPECT_TRUE(at::equal(some["y"], at::tensor({3, 7, 7}, at::kLong)));
  EXPECT_TRUE(at::equal(some["x"], at::tensor({6, 7, 14, 15, 14, 15}, at::kInt).view({3, 2})));
  EXPECT_EQ(column_y(subset.subset({4, 1, 1})), (Samples{3, 0, 0})) << "a subset of a subset";
  for (int ranks = 1; ranks <= 3; ++ranks) {
    EXPECT_EQ(run(World(subset, 1), {.global_batch_size = 2}), list);
    EXPECT_EQ(sorted(run(World(subset, ranks), {.global_batch_size = 2, .shuffle = true})), sorted(list));
  }
}

TEST(Subset, ComposesWithPreprocessors) {
  const auto twice = std::make_shared<Twice>();
  const Samples list{4, 1};
  EXPECT_EQ(column_y(numbers(6).transform(twice).subset(list)), (Samples{8, 2}));
  EXPECT_EQ(column_y(numbers(6).subset(list).transform(twice)), (Samples{8, 2}));
  EXPECT_EQ(run(World(numbers(6).transform(twice).subset(list).transform(twice), 1), {}), (Samples{16, 4}));
}

TEST(Subset, OfAFileWithChunksIsShuffledWithoutLanes) {
  const test::Folder folder;
  test::H5File(folder.file("a.h5")).columns(1000, 0, {.chunk = 10, .deflate = 1});
  const auto data = Dataset::from_hdf5({folder.file("a.h5")}, {.cache_bytes = 4000});
  ASSERT_GT(source_of(data)->blocks().rows, 0);
  Samples list;
  for (std::int64_t i = 999; i > 0; i -= 7) list.push_back(i);
  const auto subset = data.subset(list);
  EXPECT_EQ(source_of(subset)->blocks().rows, 0);
  EXPECT_EQ(source_of(subset)->fingerprint().order, "");
  EXPECT_EQ(column_y(subset), list);
  EXPECT_EQ(sorted(run(World(subset, 3), {.global_batch_size = 12, .shuffle = true})), sorted(list));
}

TEST(Subset, IsRefusedForSamplesThatDoNotExist) {
  const auto data = numbers(10);
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{10}, std::numeric_limits<std::int64_t>::max(),
                                   std::numeric_limits<std::int64_t>::min()})
    EXPECT_NE(refused([&] {
                data.subset({0, wrong});
              }).find("the list names sample " + std::to_string(wrong) + ", it has 10"),
              std::string::npos);
  EXPECT_NE(refused([&] { data.subset({}); }).find("the list of samples is empty"), std::string::npos);
  const auto stream =
      Dataset::from_stream([](const StreamShard&) { return []() -> std::optional<Json> { return {}; }; });
  refused([&] { stream.subset({0}); });
  refused([&] { stream.random_split({1.0}); });
  EXPECT_NE(refused([&] { data.column("z"); }, ExitCode::data).find("no column \"z\""), std::string::npos);
}

TEST(Subset, RanksMustAgreeOnIt) {
  const auto print = [](const Dataset& data) { return source_of(data)->fingerprint(); };
  const auto differ = [&](const Dataset& a, const Dataset& b) {
    return difference(print(a), "rank 0", DatasetFingerprint::from_json(print(b).to_json()), "rank 1");
  };
  const auto data = numbers(100);
  EXPECT_FALSE(differ(data.subset({1, 2, 3}), data.subset({1, 2, 3})));
  EXPECT_EQ(differ(data.subset({1, 2, 3}), data.subset({1, 3, 2})),
            "the values of the list of samples on rank 0 and of the list of samples on rank 1 differ");
  EXPECT_EQ(differ(data.subset({1, 2, 3}), data.subset({1, 2})), "it has 3 samples on rank 0 and 2 on rank 1");
  EXPECT_FALSE(differ(data.random_split({0.5, 0.5}, 3)[1], data.random_split({0.5, 0.5}, 3)[1]));
  EXPECT_TRUE(differ(data.random_split({0.5, 0.5}, 3)[1], data.random_split({0.5, 0.5}, 4)[1]));
  EXPECT_TRUE(differ(data.random_split({0.5, 0.5}, 3)[1], data.random_split({0.5, 0.5}, 3)[0]));
}

TEST(RandomSplit, PartsAreDisjointAndCoverAll) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    const auto count = std::int64_t(1 + random() % 300);
    std::vector<double> fractions(1 + random() % 5);
    double sum = 0;
    for (auto& fraction : fractions) sum += fraction = 1 + static_cast<double>(random() % 100);
    for (auto& fraction : fractions) fraction /= sum;
    const auto seed = random();
    std::vector<Dataset> parts;
    try {
      parts = numbers(count).random_split(fractions, seed);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("gets none"), std::string::npos) << error.what();
      EXPECT_LT(static_cast<double>(count) * *std::ranges::min_element(fractions), 1);
      continue;
    }
    ASSERT_EQ(parts.size(), fractions.size());
    Samples all;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto samples = column_y(parts[p]);
      ASSERT_LT(std::abs(static_cast<double>(samples.size()) - fractions[p] * static_cast<double>(count)), 1 + 1e-9);
      ASSERT_EQ(samples, column_y(numbers(count).random_split(fractions, seed)[p]));
      all.insert(all.end(), samples.begin(), samples.end());
    }
    ASSERT_EQ(sorted(all), indices(count));
  }
}

TEST(RandomSplit, SizesAreThoseOfTheLargestRemainder) {
  const auto sizes = [](std::int64_t count, const std::vector<double>& fractions) {
    Samples sizes;
    for (const auto& part : numbers(count).random_split(fractions)) sizes.push_back(part.count());
    return sizes;
  };
  EXPECT_EQ(sizes(10, {0.8, 0.2}), (Samples{8, 2}));
  EXPECT_EQ(sizes(100, {0.29, 0.71}), (Samples{29, 71})) << "0.29 × 100 is a little less than 29";
  EXPECT_EQ(sizes(11, {0.5, 0.5}), (Samples{6, 5})) << "the first of two with equal remainders";
  EXPECT_EQ(sizes(10, {0.33, 0.33, 0.34}), (Samples{3, 3, 4}));
  EXPECT_EQ(sizes(7, {1.0}), (Samples{7}));
  EXPECT_EQ(sizes(3, {1.0 / 3, 1.0 / 3, 1.0 / 3}), (Samples{1, 1, 1}));
}

TEST(RandomSplit, IsTheSameOnEveryMachine) {
  const auto parts = numbers(12).random_split({0.5, 0.5}, 42);
  EXPECT_EQ(column_y(parts[0]), (Samples{8, 0, 1, 10, 5, 3}));
  const auto other = numbers(12).random_split({0.5, 0.5}, 43);
  EXPECT_NE(column_y(parts[0]), column_y(other[0]));
}

TEST(RandomSplit, IsRefusedForFractionsThatAreNone) {
  const auto data = numbers(10);
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& wrong : std::vector<std::vector<double>>{
           {}, {0.5}, {0.5, 0.6}, {1.5, -0.5}, {1.0, 0.0}, {nan, 1.0}, {nan}, {0.5, 0.5, 1e9}})
    EXPECT_NE(refused([&] { data.random_split(wrong); }).find("whose sum is 1"), std::string::npos);
  EXPECT_NE(refused([&] {
              data.random_split({0.99, 0.01});
            }).find("part 1 gets none of the 10 samples"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::detail::data::subset_test
