// Communicators over some ranks, made by these ranks alone.
#include "comm/subset.hpp"

#include "comm/pool.hpp"
#include "muster/error.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace muster::detail::comm::subset_test {
namespace {

using test::world;

int rank() { return world().rank(); }
int size() { return world().size(); }

std::vector<int> all_ranks() {
  std::vector<int> all;
  for (int r = 0; r < size(); ++r) all.push_back(r);
  return all;
}

TEST(Subset, IsMadeByItsRanksAlone) {
  const std::vector<int> ends = size() == 1 ? std::vector<int>{0} : std::vector<int>{size() - 1, 0};
  const auto at = std::ranges::find(ends, rank());
  if (at != ends.end()) {
    const auto part = make_subset(world(), ends);
    EXPECT_EQ(part.rank(), at - ends.begin());
    EXPECT_EQ(part.size(), static_cast<int>(ends.size()));
    EXPECT_EQ(part.all_gather(std::to_string(rank())).front(), std::to_string(ends.front()));
  }
  world().barrier();
}

TEST(Subset, OfRanksThatOverlapAreMadeInOneOrder) {
  std::vector<Communicator> mine;
  for (int a = 0; a < size(); ++a)
    for (int b = a + 1; b < size(); ++b)
      if (rank() == a || rank() == b) mine.push_back(make_subset(world(), {a, b}));
  for (const auto& part : mine) EXPECT_EQ(part.all_reduce(1.0), 2.0);
}

TEST(Subset, ReusesCommunicators) {
  const auto make = [] {
    auto part = make_subset(world(), all_ranks());
    part.barrier();
    return part.size();
  };
  make();
  const auto before = num_mpi_communicators();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(make(), size());
  EXPECT_EQ(num_mpi_communicators(), before);
}

TEST(Subset, RefusesListsThatNoRankCanUse) {
  const int other = rank() == 0 ? 1 : 0;
  for (const auto& ranks : {std::vector<int>{}, {other}, {rank(), rank()}, {rank(), size()}, {-1, rank()}}) try {
      make_subset(world(), ranks);
      ADD_FAILURE() << "it is made";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_TRUE(std::string(error.what()).find("the list of ranks names a rank twice") != std::string::npos);
    }
}

}  // namespace
}  // namespace muster::detail::comm::subset_test
