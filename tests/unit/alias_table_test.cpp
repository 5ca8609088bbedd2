#include "data/passes/alias_table.hpp"

#include "data/sources/permutation.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace muster::detail::data::alias_table_test {
namespace {

constexpr auto last_coin = std::numeric_limits<std::uint64_t>::max();

/// The smallest random number that chooses this column.
std::uint64_t random_number_of(std::size_t column, std::size_t columns) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(((Wide{column} << 64) + columns - 1) / columns);
}

/// The share of the coins by which a column gives its own item, found by bisection.
long double own_share(const AliasTable& table, std::uint64_t column, std::int64_t item) {
  if (table(column, last_coin) == item) return 1;
  std::uint64_t own = 0, other = last_coin;  // the answer is between them
  if (table(column, 0) != item) return 0;
  while (other - own > 1) (table(column, own + (other - own) / 2) == item ? own : other) = own + (other - own) / 2;
  return static_cast<long double>(other) / 0x1p64L;
}

std::vector<long double> probabilities(const AliasTable& table) {
  const auto count = static_cast<std::size_t>(table.size());
  std::vector<long double> all(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto column = random_number_of(i, count);
    const auto own = own_share(table, column, static_cast<std::int64_t>(i));
    all[i] += own;
    all[static_cast<std::size_t>(table(column, last_coin))] += 1 - own;
  }
  for (auto& probability : all) probability /= static_cast<long double>(count);
  return all;
}

void expect_exact(const std::vector<double>& weights) {
  long double sum = 0;
  const double largest = *std::max_element(weights.begin(), weights.end());
  for (const auto weight : weights) sum += weight / static_cast<long double>(largest);
  const auto have = probabilities(AliasTable(weights));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto want = weights[i] / static_cast<long double>(largest) / sum;
    EXPECT_LE(std::abs(have[i] - want), want * 0x1p-51L + 0x1p-62L) << i << " of " << weights.size();
    EXPECT_TRUE(weights[i] > 0 || have[i] == 0) << i;
  }
}

TEST(AliasTable, DrawsWithTheProbabilitiesOfTheWeights) {
  expect_exact({3});
  expect_exact({1, 1, 1});
  expect_exact({0, 0, 5, 0});
  expect_exact({0.1, 0.2, 0.3, 0.4});
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> weights(1 + random() % 40);
    // Of any size: some are 0, and some are a tiny part of the sum.
    for (auto& weight : weights) weight = random() % 4 == 0 ? 0 : std::ldexp(1 + random() % 1000, -int(random() % 70));
    weights[random() % weights.size()] = 1;
    expect_exact(weights);
  }
}

TEST(AliasTable, TakesTheLargestAndTheSmallestNumbers) {
  constexpr auto largest = std::numeric_limits<double>::max(), smallest = std::numeric_limits<double>::denorm_min();
  expect_exact({largest, largest, largest / 2});
  expect_exact({smallest, 3 * smallest, 0});
  expect_exact({largest, smallest});
}

TEST(AliasTable, OfManyItemsLosesNone) {
  std::vector<double> weights(100'000, 1);
  weights[777] = 1e6;
  const AliasTable table(weights);
  std::vector<std::int64_t> hits(weights.size());
  constexpr int draws = 1'000'000;
  for (std::uint64_t i = 0; i < draws; ++i) ++hits[static_cast<std::size_t>(table(mix(1, i), mix(2, i)))];
  const double expected = draws * 1e6 / (1e6 + 99'999);
  EXPECT_NEAR(static_cast<double>(hits[777]), expected, 6 * std::sqrt(draws * 0.909 * 0.091));
  EXPECT_GT(std::count_if(hits.begin(), hits.end(), [](auto n) { return n > 0; }), 50'000) << "1 − 1/e of the others";
}

TEST(AliasTable, HashTellsWeightsApart) {
  const auto hash = [](std::vector<double> weights) { return AliasTable(weights).hash(); };
  EXPECT_EQ(hash({1, 2, 3}), hash({1, 2, 3}));
  EXPECT_EQ(hash({1, 0.0}), hash({1, -0.0}));
  EXPECT_EQ((std::set{hash({1, 2, 3}), hash({1, 3, 2}), hash({1, 2}), hash({2, 4, 6}), hash({1, 2, 3, 0})}).size(), 5u);
}

}  // namespace
}  // namespace muster::detail::data::alias_table_test
