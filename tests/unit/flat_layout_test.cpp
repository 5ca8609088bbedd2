#include "gradients/flat_layout.hpp"
#include "gradients/exchange.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace muster::detail::gradients::flat_layout_test {
namespace {

using Members = std::vector<std::vector<std::size_t>>;

TEST(FlatLayout, PutsTheMembersOfABucketOneBehindTheOther) {
  const FlatLayout layout({at::zeros({2, 3}), at::zeros({4}), at::zeros({})}, {{2, 0}, {1}});
  ASSERT_EQ(layout.buckets.size(), 2U);
  EXPECT_EQ(layout.buckets[0].members, (std::vector<std::size_t>{2, 0}));
  EXPECT_EQ(layout.buckets[0].element_count, 7U);
  EXPECT_EQ(layout.buckets[1].element_count, 4U);
  const std::size_t expected[][4] = {{0, 1, 1, 6}, {1, 0, 0, 4}, {0, 0, 0, 1}};
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& slice = layout.slices[i];
    EXPECT_EQ(slice.bucket, expected[i][0]) << "parameter " << i;
    EXPECT_EQ(slice.index_in_bucket, expected[i][1]) << "parameter " << i;
    EXPECT_EQ(slice.first_element, expected[i][2]) << "parameter " << i;
    EXPECT_EQ(slice.element_count, expected[i][3]) << "parameter " << i;
  }
}

TEST(FlatLayout, MayHoldNothing) {
  EXPECT_TRUE(FlatLayout({}, {}).buckets.empty());
  const FlatLayout layout({at::zeros({0}), at::zeros({5})}, {{0, 1}});
  EXPECT_EQ(layout.slices[0].element_count, 0U);
  EXPECT_EQ(layout.slices[1].first_element, 0U);
}

TEST(FlatLayout, PartsTypesAndKeepsTheOrder) {
  const auto d = at::zeros({1}, at::kDouble), f = at::zeros({1}), h = at::zeros({1}, at::kHalf);
  EXPECT_EQ(by_type_and_device({d, f, d, h, f, d}), (Members{{3}, {1, 4}, {0, 2, 5}}));
  EXPECT_EQ(by_type_and_device({f, at::zeros({1}, at::kMeta), f}), (Members{{0, 2}, {1}}));
  EXPECT_EQ(by_type_and_device({}), Members{});
}

TEST(FlatLayout, ShowsABucketInTheParametersOrderOfMemory) {
  const auto bucket = at::arange(10);
  const auto turned = at::zeros({2, 3}).t();
  const auto view = view_like(turned, bucket, 4);
  EXPECT_EQ(view.sizes(), turned.sizes());
  EXPECT_EQ(view.strides(), turned.strides());
  EXPECT_EQ(view.const_data_ptr(), bucket[4].const_data_ptr());
  const auto with_gaps = at::zeros({2, 6}).slice(1, 0, 3);
  EXPECT_TRUE(view_like(with_gaps, bucket, 4).is_contiguous()) << "no more than its elements are in the bucket";
  EXPECT_EQ(view_like(with_gaps, bucket, 4)[1][2].item<int>(), 9);
}

/// The notes of all ranks.
Notes sum_of(Notes one, const Notes& other) {
  for (std::size_t i = 0; i < one.numbers().size(); ++i) one.numbers()[i] += other.numbers()[i];
  return one;
}

TEST(Notes, TellHowManyRanksHaveUsedAParameter) {
  Notes one(4), other(4);
  one.set_use(0, ParameterUse::used);
  other.set_use(0, ParameterUse::used);
  one.set_use(1, ParameterUse::used);
  other.set_use(1, ParameterUse::unused);
  EXPECT_FALSE(sum_of(one, other).any_abandoned());
  other.set_use(2, ParameterUse::abandoned);
  const auto all = sum_of(one, other);
  EXPECT_EQ(all.user_count(0), 2);
  EXPECT_EQ(all.user_count(1), 1);
  EXPECT_EQ(all.user_count(2), -1);
  EXPECT_EQ(all.user_count(3), 0);
  EXPECT_TRUE(all.any_abandoned());
}

TEST(Notes, TellWhatAnyRankHasSet) {
  Notes one(1), other(1);
  one.begin(0b0101, 0.375);
  other.begin(0b0100, 1e9);
  EXPECT_EQ(sum_of(one, other).flags(), 0b0101U);
  EXPECT_EQ(sum_of(one, other).weight(), 1e9 + 0.375);
  one.set_word(0xf0000003);
  EXPECT_FALSE(sum_of(one, other).all_words_equal(2));
  other.set_word(0xf0000003);
  EXPECT_TRUE(sum_of(one, other).all_words_equal(2));
  EXPECT_EQ(one.word(), 0xf0000003U);
  one.begin(0, 0);
  EXPECT_EQ(one.flags(), 0U);
  EXPECT_EQ(one.weight(), 0);
  EXPECT_EQ(one.word(), 0U);
}

}  // namespace
}  // namespace muster::detail::gradients::flat_layout_test
