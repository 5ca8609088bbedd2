#include "live/reservoir.hpp"

#include "base/hash.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

namespace muster::detail::live {
namespace {

/// Gives the reservoir samples first … last − 1 of solver 0; returns how many could not be taken.
std::int64_t give(Reservoir& reservoir, std::int64_t first, std::int64_t last) {
  std::int64_t waiting = 0;
  for (auto number = first; number < last; ++number)
    if (!reservoir.can_take(number))
      ++waiting;
    else if (const auto slot = reservoir.make_room(number))
      reservoir.fill(*slot, 0, number);
  return waiting;
}

std::vector<std::int64_t> numbers(const Reservoir& reservoir, const std::vector<std::int64_t>& slots) {
  std::vector<std::int64_t> all;
  for (const auto slot : slots) all.push_back(reservoir[slot].number);
  return all;
}

void expect_balanced(const Reservoir& reservoir) {
  const auto& fates = reservoir.fates();
  EXPECT_EQ(fates.received, reservoir.waiting() + fates.used + fates.validation + fates.dropped + fates.lost);
}

TEST(Reservoir, FifoKeepsTheOrderAndTakesNothingWhenFull) {
  Reservoir reservoir({.rule = LiveRule::fifo, .capacity = 4});
  EXPECT_EQ(give(reservoir, 0, 6), 2);
  EXPECT_EQ(numbers(reservoir, reservoir.draw(3, 0)), (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(give(reservoir, 4, 8), 1);
  EXPECT_EQ(numbers(reservoir, reservoir.draw(4, 0)), (std::vector<std::int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(reservoir.size(), 0);
  expect_balanced(reservoir);
}

TEST(Reservoir, FiroUsesEachOnceInRandomOrder) {
  Reservoir reservoir({.rule = LiveRule::firo, .capacity = 50, .seed = 7});
  EXPECT_EQ(give(reservoir, 0, 50), 0);
  auto drawn = numbers(reservoir, reservoir.draw(50, 0));
  EXPECT_FALSE(std::ranges::is_sorted(drawn));
  std::ranges::sort(drawn);
  for (std::int64_t i = 0; i < 50; ++i) EXPECT_EQ(drawn[static_cast<std::size_t>(i)], i);
}

TEST(Reservoir, AnUnusedSampleIsNeverThrownAway) {
  Reservoir reservoir({.rule = LiveRule::reservoir, .capacity = 8, .seed = 1});
  std::set<std::int64_t> given, used;
  std::int64_t next = 0;
  for (int round = 0; round < 200; ++round) {
    for (; reservoir.can_take(next); ++next) give(reservoir, next, next + 1), given.insert(next);
    for (const auto number : numbers(reservoir, reservoir.draw(3, 1))) used.insert(number);
    expect_balanced(reservoir);
  }
  for (std::int64_t i = 0; i < reservoir.size(); ++i) used.insert(reservoir[reservoir.slot(i)].number);
  EXPECT_EQ(used, given) << "each was used, or is there";
  EXPECT_GT(next, 200);
}

TEST(Reservoir, ASampleLeavesAfterItsUses) {
  Reservoir reservoir({.rule = LiveRule::reservoir, .capacity = 4, .max_uses = 2});
  give(reservoir, 0, 4);
  std::map<std::int64_t, int> uses;
  for (int i = 0; i < 8; ++i)
    for (const auto number : numbers(reservoir, reservoir.draw(1, 0))) ++uses[number];
  EXPECT_EQ(uses, (std::map<std::int64_t, int>{{0, 2}, {1, 2}, {2, 2}, {3, 2}}));
  EXPECT_TRUE(reservoir.draw(1, 0).empty());
}

TEST(Reservoir, FreshSamplesComeFirst) {
  Reservoir reservoir({.rule = LiveRule::reservoir, .capacity = 8, .seed = 3});
  give(reservoir, 0, 4);
  reservoir.draw(4, 4);
  give(reservoir, 4, 6);
  auto drawn = numbers(reservoir, reservoir.draw(3, 2));
  std::sort(drawn.begin(), drawn.begin() + 2);
  EXPECT_EQ(drawn[0], 4);
  EXPECT_EQ(drawn[1], 5);
}

TEST(Reservoir, UniformKeepsEachSampleEquallyOften) {
  constexpr int rounds = 4000, samples = 20, capacity = 5;
  std::vector<int> kept(samples);
  for (int round = 0; round < rounds; ++round) {
    Reservoir reservoir({.rule = LiveRule::uniform, .capacity = capacity, .seed = static_cast<std::uint64_t>(round)});
    EXPECT_EQ(give(reservoir, 0, samples), 0);
    EXPECT_EQ(reservoir.fates().dropped, samples - capacity);
    for (std::int64_t i = 0; i < reservoir.size(); ++i)
      ++kept[static_cast<std::size_t>(reservoir[reservoir.slot(i)].number)];
  }
  // Five deviations of a binomial distribution.
  constexpr double share = static_cast<double>(capacity) / samples, expected = rounds * share;
  for (const auto count : kept) EXPECT_NEAR(count, expected, 5 * std::sqrt(expected * (1 - share)));
}

TEST(Reservoir, SomeAreHeldOut) {
  Reservoir reservoir({.rule = LiveRule::fifo, .capacity = 30, .validation = 2, .validation_every = 3});
  give(reservoir, 0, 30);
  std::vector<std::int64_t> held_out, others;
  for (std::int64_t number = 0; number < 30; ++number)
    (scrambled(static_cast<std::uint64_t>(number)) % 3 == 0 && held_out.size() < 2 ? held_out : others)
        .push_back(number);
  ASSERT_EQ(held_out.size(), 2u);
  EXPECT_EQ(numbers(reservoir, reservoir.next_held_out(3)),
            (std::vector<std::int64_t>{held_out[0], held_out[1], held_out[0]}));
  EXPECT_EQ(numbers(reservoir, reservoir.draw(28, 0)), others);
  expect_balanced(reservoir);
}

TEST(Reservoir, SamplesAreLostAndRestored) {
  Reservoir before({.rule = LiveRule::reservoir, .capacity = 4, .seed = 5});
  const auto slot = before.make_room(0);
  before.give_back(*slot);
  give(before, 1, 4);
  before.draw(1, 1);
  expect_balanced(before);
  Reservoir after({.rule = LiveRule::reservoir, .capacity = 4, .seed = 5});
  for (std::int64_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after.restore(before[before.slot(i)]));
  after.restore(before.fates());
  EXPECT_EQ(after.waiting(), 2);
  EXPECT_EQ(after.size(), 3);
  EXPECT_EQ(after.fates().lost, 1);
  expect_balanced(after);
  EXPECT_TRUE(after.restore({.number = 9}));
  EXPECT_FALSE(after.restore({.number = 10})) << "it is full";
}

}  // namespace
}  // namespace muster::detail::live
