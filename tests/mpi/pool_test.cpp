// MPI communicators are used again: a hundred uses make no more of them than the first few, and no use sees anything of
// the one before.
#include "comm/pool.hpp"

#include "comm/agreement.hpp"
#include "comm/channel.hpp"
#include "comm/collectives.hpp"
#include "comm/handshake.hpp"
#include "comm/mailbox.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/wait.hpp"
#include "support/world.hpp"

#include "muster/mpi.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::comm::pool_test {
namespace {

using namespace std::chrono_literals;
using test::world;

const Timeouts half_a_minute{.done = 30s, .failed = 30s};

/// Calls body(round) again and again, and expects that no MPI communicator is made after the first rounds.
template <class Body>
void expect_none_made(int rounds, Body&& body) {
  constexpr int first = 3;
  std::int64_t before = 0;
  for (int round = 0; round < first + rounds; ++round) {
    if (round == first) before = num_mpi_communicators();
    body(round);
  }
  EXPECT_EQ(num_mpi_communicators(), before);
}

void expect_that_it_works(const Communicator& communicator) {
  EXPECT_EQ(communicator.all_reduce(std::int64_t{1}), communicator.size());
  const auto values = communicator.all_gather(std::to_string(communicator.rank()));
  for (std::size_t r = 0; r < values.size(); ++r) EXPECT_EQ(values[r], std::to_string(r));
  EXPECT_EQ(communicator.broadcast(std::to_string(communicator.rank())), "0");
  communicator.barrier();
}

int next() { return (world().rank() + 1) % world().size(); }
int previous() { return (world().rank() + world().size() - 1) % world().size(); }

/// The world as if each rank were on a node of its own, so that MPI carries everything.
Communicator apart_on_nodes() {
  Placement placement;
  for (int r = 0; r < world().size(); ++r) {
    placement.node_of_rank.push_back(r);
    placement.hosts.push_back(std::to_string(r));
  }
  return make_world(world(), std::move(placement));
}

TEST(Pool, DuplicatesAndPartsUseThemAgain) {
  expect_none_made(100, [](int) {
    const auto copy = world().duplicate();
    const auto part = copy.split(world().rank() % 2, -world().rank());
    const auto alone = part.split(part.rank());
    for (const auto& one : {copy, part, part.duplicate(), alone}) expect_that_it_works(one);
  });
}

TEST(Pool, WorldsAndMailboxesUseThemAgain) {
  expect_none_made(30, [](int round) {
    const auto apart = make_separate_world(world().split(world().rank() % 2));
    Mailbox mailbox(world());
    const auto word = "round " + std::to_string(round);
    mailbox.send(next(), word);
    mailbox.send(next(), "a letter that nobody reads");
    std::optional<std::string> heard;
    EXPECT_TRUE(wait_until([&] { return (heard = mailbox.receive()).has_value(); }, 30s));
    EXPECT_EQ(heard, word);
    const auto inner = make_separate_world(apart);
    expect_that_it_works(inner.duplicate());
  });
}

TEST(Pool, WorldsFromMpiUseThemAgain) {
  expect_none_made(20, [](int) { expect_that_it_works(from_mpi(MPI_COMM_WORLD).duplicate()); });
}

TEST(FromMpi, WhatHasNoRanksOrTwoGroupsIsRefused) {
  const auto refused = [](MPI_Comm comm, const std::string& fact) {
    try {
      from_mpi(comm);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_NE(std::string(error.what()).find("taking up an MPI communicator: it is " + fact), std::string::npos)
          << error.what();
    }
  };
  refused(MPI_COMM_NULL, "MPI_COMM_NULL");
  if (world().size() == 1) return;
  const bool is_first = world().rank() == 0;
  MPI_Comm group = MPI_COMM_NULL, both = MPI_COMM_NULL;
  ASSERT_EQ(MPI_Comm_split(MPI_COMM_WORLD, is_first, 0, &group), MPI_SUCCESS);
  ASSERT_EQ(MPI_Intercomm_create(group, 0, MPI_COMM_WORLD, is_first ? 1 : 0, 7, &both), MPI_SUCCESS);
  refused(both, "an intercommunicator");
  MPI_Comm_free(&both);
  MPI_Comm_free(&group);
}

TEST(Pool, AnOperationThatNobodyWaitsForHoldsThemOnlyUntilItsEnd) {
  expect_none_made(20, [](int round) {
    {
      const auto apart = make_separate_world(world());
      const auto values = std::make_shared<std::vector<double>>(50'000, 1.0);
      auto sum = Collectives(apart).all_reduce(values->data(), values->size(), Dtype::f64, ReduceOp::sum);
      sum.keep(values);
      if (world().rank() != round % world().size()) sum.wait();  // the other rank drops it
    }
    world().barrier();
    Channel::advance_all();
  });
}

TEST(Pool, AMessageThatNobodyReceivedIsDropped) {
  // The second message has the tag of the last message of a use of an MPI communicator (see MpiCommunicator).
  for (const std::size_t count : {1UL, 300'000UL})
    expect_none_made(10, [&](int round) {
      {
        Collectives before(world().duplicate());
        for (const int tag : {7, 0}) {
          const auto stale = std::make_shared<std::vector<std::int32_t>>(count, -1);
          before.send(stale->data(), count, Dtype::i32, next(), tag).keep(stale);
        }
        const auto half = std::make_shared<std::vector<std::int32_t>>(count, -1);
        if (round % 2 == 0 || world().rank() == 0)  // not on all ranks
          before.all_to_all({{half->data(), count, next()}}, {}, Dtype::i32).keep(half);
      }
      const auto channel = world().duplicate();
      Collectives after(channel);
      std::vector<std::int32_t> sent(count, round), received(count);
      auto receive = after.receive(received.data(), count, Dtype::i32, previous(), 7);
      auto send = after.send(sent.data(), count, Dtype::i32, next(), 7);
      receive.wait(30s);
      send.wait(30s);
      EXPECT_EQ(received, sent);
      expect_that_it_works(channel);
    });
}

TEST(Pool, AReceiveThatWasAbandonedGetsNothing) {
  for (const std::size_t count : {1UL, 300'000UL})
    expect_none_made(10, [&](int round) {
      const auto old = std::make_shared<std::vector<std::int32_t>>(count, -1);
      {
        Collectives before(world().duplicate());
        before.receive(old->data(), count, Dtype::i32, previous(), 7).keep(old);
        before.receive_any(old->data(), count, Dtype::i32, 7).keep(old);
      }
      Collectives after(world().duplicate());
      std::vector<std::int32_t> sent(count, round), received(count);
      auto receive = after.receive(received.data(), count, Dtype::i32, previous(), 7);
      auto send = after.send(sent.data(), count, Dtype::i32, next(), 7);
      receive.wait(30s);
      send.wait(30s);
      EXPECT_EQ(received, sent);
      EXPECT_EQ(*old, std::vector<std::int32_t>(count, -1));
    });
}

TEST(Pool, RanksMayKeepDifferentOnes) {
  std::optional<Communicator> held;
  expect_none_made(10, [&](int round) {
    held.reset();
    // Each rank keeps another one of them.
    std::vector<Communicator> all;
    for (int i = 0; i < world().size() + 1; ++i) all.push_back(world().duplicate());
    held = all[static_cast<std::size_t>((world().rank() + round) % world().size())];
    all.clear();
    const auto one = world().duplicate(), other = world().duplicate();
    expect_that_it_works(one);
    expect_that_it_works(other);
  });
  world().barrier();
}

TEST(Pool, OneRankMayKeepAll) {
  std::vector<Communicator> kept;
  for (int round = 0; round < 5; ++round) {
    const auto one = world().duplicate();
    if (world().rank() == 0) kept.push_back(one);
  }
  expect_that_it_works(world().duplicate());
  kept.clear();
  expect_none_made(20, [](int) { expect_that_it_works(world().duplicate()); });
}

TEST(Pool, ThreadsMayTakeAtOnce) {
  if (!threads_may_call_mpi()) GTEST_SKIP() << "needs MPI_THREAD_MULTIPLE";
  const auto work = [](const Communicator& over) {
    for (int i = 0; i < 30; ++i) expect_that_it_works(over.duplicate());
  };
  const auto mine = world().duplicate(), others = world().duplicate();
  std::jthread other([&] { work(others); });
  work(mine);
}

/// What the other ranks do while one fails.
std::vector<std::function<void(const Communicator&)>> calls() {
  return {
      [](const Communicator& of) { of.barrier(); },
      [](const Communicator& of) { of.all_gather("stale"); },
      [](const Communicator& of) {
        std::vector<double> values(200'000, -1.0);
        of.all_reduce(std::span(values));
      },
      [](const Communicator& of) { of.broadcast("stale", of.size() - 1); },
      [](const Communicator& of) {
        for (int i = 0; i < 20; ++i) of.broadcast("stale", i % of.size());
      },
      [](const Communicator& of) {
        const auto stale = std::make_shared<std::vector<double>>(1000, -1.0);
        auto request = Collectives(of).reduce(stale->data(), 1000, Dtype::f64, ReduceOp::sum, of.size() - 1);
        request.keep(stale);
        request.wait();
        of.barrier();
      },
      [](const Communicator& of) { of.duplicate(); },
      [](const Communicator& of) {
        const auto nothing = std::make_shared<int>(0);
        auto request = Collectives(of).receive(nothing.get(), 1, Dtype::i32, of.rank(), 7);
        request.keep(nothing);
        request.wait();
      },
      [](const Communicator& of) {
        const auto stale = std::make_shared<std::vector<double>>(100'000, -1.0);
        Collectives(of).all_reduce(stale->data(), stale->size(), Dtype::f64, ReduceOp::sum).keep(stale);
        of.split(0).barrier();
      },
  };
}

/// Runs attempts that each fail on one rank, and checks that the next one works.
void fail_again_and_again(const Communicator& ranks, int rounds) {
  const auto all = calls();
  const auto per_round = static_cast<int>(all.size());
  expect_none_made(rounds, [&](int round) {
    for (int call = 0; call < per_round; ++call) {
      const int bad = (round * per_round + call) % ranks.size();
      const auto channel = ranks.duplicate();
      const auto error = attempt_on_all(ranks, half_a_minute, [&] {
        expect_that_it_works(channel);
        if (ranks.rank() == bad) throw Error(ExitCode::retry, "working", "a passing trouble", "Try again");
        all[static_cast<std::size_t>(call)](channel);
        ranks.barrier();
      });
      ASSERT_TRUE(error);
      EXPECT_NE(std::string(error->what()).find("a passing trouble"), std::string::npos) << error->what();
      expect_that_it_works(ranks);
      expect_that_it_works(ranks.duplicate());
    }
  });
}

TEST(Pool, FailedAttemptsUseThemAgain) { fail_again_and_again(make_separate_world(world()), 6); }

TEST(Pool, FailedAttemptsOverNodesUseThemAgain) { fail_again_and_again(apart_on_nodes(), 6); }

class MpiCommunicatorTest : public testing::Test {
 protected:
  using Kind = node::Call::Kind;

  PooledCommunicator take() {
    const auto& channel = *Channel::of(world());
    const auto ranks = channel.all_ranks();
    return std::move(pool_->take(1, ranks, *channel.transport->collective, ranks, "testing").front());
  }

  /// Starts a collective that nobody waits for.
  static void abandon(MpiCommunicator& communicator, const node::Call& call) {
    const auto memory = std::make_shared_for_overwrite<float[]>(std::max<std::size_t>(1, call.count));
    communicator.abandon({}, {communicator.start(call, memory.get())}, memory);
  }

  /// Whether the communicator is taken again after begin() was called for it on each rank.
  bool is_used_again_after(const std::function<void(MpiCommunicator&)>& begin) {
    std::uint64_t id = 0;
    {
      const auto taken = take();
      id = taken->id;
      begin(*taken);
    }
    const auto again = take();
    Handshake(*again, "testing").all_true(true);
    return again->id == id;
  }

 private:
  const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
};

TEST_F(MpiCommunicatorTest, RanksCatchUpWithCollectivesThatOthersHaveBegun) {
  for (int round = 0; round < 10; ++round)
    EXPECT_TRUE(is_used_again_after([&](MpiCommunicator& communicator) {
      const int rank = world().rank(), root = round % world().size();
      if (rank >= 1) abandon(communicator, {.kind = Kind::all_reduce, .type = Dtype::f32, .count = 100});
      if (rank < 2) return;
      for (const auto kind : {Kind::reduce, Kind::broadcast})
        abandon(communicator, {.kind = kind, .type = Dtype::f32, .root = root, .count = 100});
      for (int i = 0; i < 200; ++i) abandon(communicator, {.kind = Kind::barrier});
    })) << round;
}

TEST_F(MpiCommunicatorTest, IsNotUsedAgainIfRanksWereInDifferentCollectives) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  EXPECT_FALSE(is_used_again_after([](MpiCommunicator& communicator) {
    const auto kind = world().rank() == 0 ? Kind::barrier : Kind::broadcast;
    abandon(communicator, {.kind = kind, .type = Dtype::f32, .root = 0, .count = 100});
  }));
}

TEST_F(MpiCommunicatorTest, IsNotUsedAgainIfARankCannotCatchUp) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  EXPECT_FALSE(is_used_again_after([](MpiCommunicator& communicator) {
    for (int i = 0; world().rank() == 0 && i < 1000; ++i) abandon(communicator, {.kind = Kind::barrier});
  }));
  constexpr std::size_t large = std::size_t{20} << 20;  // 80 MB
  EXPECT_FALSE(is_used_again_after([](MpiCommunicator& communicator) {
    for (int i = 0; world().rank() == 0 && i < 4; ++i)
      abandon(communicator, {.kind = Kind::broadcast, .type = Dtype::f32, .root = 0, .count = large});
  }));
}

TEST_F(MpiCommunicatorTest, IsNotUsedAgainIfAHandshakeWasLeft) {
  const bool leaves = world().rank() == world().size() - 1;
  EXPECT_FALSE(is_used_again_after([&](MpiCommunicator& communicator) {
    if (leaves) communicator.mark_unusable();
  }));
}

}  // namespace
}  // namespace muster::detail::comm::pool_test
