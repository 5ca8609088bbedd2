// Collectives over several nodes, on one machine: worlds whose ranks are told that they are on different nodes.
#include "comm/agreement.hpp"
#include "comm/collectives.hpp"
#include "comm/make_world.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/shared_memory.hpp"
#include "comm/step_times.hpp"
#include "comm/timeout.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::detail::comm::nodes_test {
namespace {

using namespace std::chrono_literals;
using test::world;

/// The node of each rank, on hosts "0", "1" and so on.
Communicator on_nodes(const std::vector<int>& node_of_rank) {
  Placement placement{.node_of_rank = node_of_rank, .hosts = {}};
  for (const int node : node_of_rank) placement.hosts.push_back(std::to_string(node));
  return make_world(world(), std::move(placement));
}

/// Nodes are numbered by their lowest rank, as in a topology.
const std::vector<std::vector<int>> placements{{0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 1},
                                               {0, 1, 0, 1}, {0, 1, 1, 2}, {0, 1, 2, 3}};

/// Values whose sum depends on the order.
template <class T>
T value(std::size_t i, int rank) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(i % 1000) * (rank + 1) - rank;
  else
    return T{1} / static_cast<T>(static_cast<std::size_t>(rank) * 7 + i % 1000 + 3);
}

/// Sums in the order of the nodes, each of which sums its ranks in their order.
template <class T>
T sum_over(const std::vector<int>& node_of_rank, std::size_t i) {
  std::vector<T> sums;
  for (std::size_t r = 0; r < node_of_rank.size(); ++r) {
    const auto mine = value<T>(i, static_cast<int>(r));
    const auto node = static_cast<std::size_t>(node_of_rank[r]);
    if (node == sums.size())
      sums.push_back(mine);
    else
      sums[node] += mine;
  }
  auto sum = sums.front();
  for (std::size_t n = 1; n < sums.size(); ++n) sum += sums[n];
  return sum;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
}

template <class T>
void expect_sums(const Communicator& nodes, std::span<T> data, const std::vector<int>& node_of_rank) {
  std::vector<T> want(data.size()), flat(data.size());
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = flat[i] = value<T>(i, world().rank());
    want[i] = sum_over<T>(node_of_rank, i);
  }
  nodes.all_reduce(data);
  world().all_reduce(std::span<T>(flat));
  EXPECT_TRUE(same_bits<T>(data, want)) << data.size() << " elements";
  // These nodes sum their ranks one after the other, as a single node does.
  if (std::is_integral_v<T> || node_of_rank == std::vector{0, 0, 0, 1} || node_of_rank == std::vector{0, 1, 2, 3}) {
    EXPECT_TRUE(same_bits<T>(data, flat)) << data.size() << " elements";
  }
}

TEST(Nodes, SumsAreThoseOfTheFlatOnes) {
  for (const auto& node_of_rank : placements) {
    SCOPED_TRACE(testing::PrintToString(node_of_rank));
    const auto nodes = on_nodes(node_of_rank);
    for (const std::size_t count : {0, 1, 15, 5'000, 100'003, 400'009}) {
      std::vector<float> floats(count);
      std::vector<double> doubles(count);
      std::vector<std::int64_t> integers(count);
      expect_sums<float>(nodes, floats, node_of_rank);
      expect_sums<double>(nodes, doubles, node_of_rank);
      expect_sums<std::int64_t>(nodes, integers, node_of_rank);
      expect_sums<float>(nodes, nodes.shared_memory(count * sizeof(float)).as<float>(), node_of_rank);
    }
  }
}

TEST(Nodes, AllReducesUnderWayEndInWhateverOrderRanksWaitForThem) {
  constexpr std::size_t count = 400'009, dropped = 2;
  for (const auto& node_of_rank : placements) {
    SCOPED_TRACE(testing::PrintToString(node_of_rank));
    const auto nodes = on_nodes(node_of_rank);
    Collectives collectives(nodes);
    std::vector<std::vector<double>> data(5, std::vector<double>(count, nodes.rank()));
    std::vector<Request> requests;
    for (std::size_t i = 0; i < data.size(); ++i) {
      for (auto& element : data[i]) element += static_cast<double>(10 * i);
      requests.push_back(collectives.all_reduce(data[i].data(), count, Dtype::f64, ReduceOp::sum));
    }
    requests[dropped] = {};  // its memory stays, and the other ranks need this one's part
    collectives.barrier().wait(20s);
    for (std::size_t i = data.size(); i-- > 0;) requests[nodes.rank() == 1 ? data.size() - 1 - i : i].wait(20s);
    for (std::size_t i = 0; i < data.size(); ++i)
      EXPECT_EQ(data[i], std::vector<double>(count, 6.0 + 40.0 * static_cast<double>(i))) << i;
    nodes.barrier();
  }
}

TEST(Nodes, EveryTypeAndOperationIsThatOfTheFlatOne) {
  for (const auto& node_of_rank : placements) {
    SCOPED_TRACE(testing::PrintToString(node_of_rank));
    Collectives over_nodes(on_nodes(node_of_rank)), flat(world());
    const auto expect_same = [&](Dtype type, ReduceOp op, const std::vector<std::uint8_t>& bytes) {
      auto have = bytes, want = bytes;
      over_nodes.all_reduce(have.data(), bytes.size() / size_of(type), type, op).wait();
      flat.all_reduce(want.data(), bytes.size() / size_of(type), type, op).wait();
      EXPECT_EQ(have, want) << "type " << static_cast<int>(type) << ", operation " << static_cast<int>(op);
    };
    // Bytes of small whole numbers are small whole numbers in every integer type.
    std::vector<std::uint8_t> integers(9'600);
    for (std::size_t i = 0; i < integers.size(); ++i)
      integers[i] = i % 8 == 0 ? (i / 8 + static_cast<std::size_t>(world().rank())) % 5 : 0;
    for (const auto type : {Dtype::u8, Dtype::i8, Dtype::i16, Dtype::i32, Dtype::i64})
      for (const auto op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max, ReduceOp::bit_and,
                            ReduceOp::bit_or, ReduceOp::bit_xor})
        expect_same(type, op, integers);
    // 1, 2, 3 and 4: their sums and products are exact in both.
    for (const auto& [type, four] :
         {std::pair{Dtype::bf16, std::vector<std::uint16_t>{0x3f80, 0x4000, 0x4040, 0x4080}},
          std::pair{Dtype::f16, std::vector<std::uint16_t>{0x3c00, 0x4000, 0x4200, 0x4400}}}) {
      std::vector<std::uint8_t> halves;
      for (std::size_t i = 0; i < 5'000; ++i)
        for (const auto byte :
             std::bit_cast<std::array<std::uint8_t, 2>>(four[(i + static_cast<std::size_t>(world().rank())) % 4]))
          halves.push_back(byte);
      for (const auto op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max})
        expect_same(type, op, halves);
    }
  }
}

TEST(Nodes, EveryCollectiveReachesAllNodes) {
  for (const auto& node_of_rank : placements) {
    SCOPED_TRACE(testing::PrintToString(node_of_rank));
    const auto nodes = on_nodes(node_of_rank);
    nodes.barrier();
    for (int root = 0; root < nodes.size(); ++root) {
      EXPECT_EQ(nodes.broadcast("from " + std::to_string(nodes.rank()), root), "from " + std::to_string(root));
      std::vector<double> sums(1000, nodes.rank() + 1.0);
      Collectives(nodes).reduce(sums.data(), sums.size(), Dtype::f64, ReduceOp::sum, root).wait();
      EXPECT_EQ(sums, std::vector<double>(1000, nodes.rank() == root ? 10.0 : nodes.rank() + 1.0));
    }
    const auto values = nodes.all_gather(std::to_string(nodes.rank()));
    for (int r = 0; r < nodes.size(); ++r) EXPECT_EQ(values[static_cast<std::size_t>(r)], std::to_string(r));
  }
}

void expect_topology(const Communicator& communicator, const std::vector<int>& node_of_rank,
                     const std::vector<std::string>& hosts) {
  const auto& topology = communicator.topology();
  const auto mine = static_cast<std::size_t>(communicator.rank());
  const int node = node_of_rank[mine];
  EXPECT_EQ(topology.node_of_rank, node_of_rank);
  EXPECT_EQ(topology.hosts, hosts);
  EXPECT_EQ(topology.node_rank, node);
  EXPECT_EQ(topology.num_nodes, *std::ranges::max_element(node_of_rank) + 1);
  EXPECT_EQ(topology.local_size, std::ranges::count(node_of_rank, node));
  EXPECT_EQ(topology.local_rank, std::count(node_of_rank.begin(), node_of_rank.begin() + communicator.rank(), node));
}

TEST(Nodes, DuplicatesAndPartsKeepThem) {
  for (const auto& node_of_rank : placements) {
    SCOPED_TRACE(testing::PrintToString(node_of_rank));
    const auto nodes = on_nodes(node_of_rank);
    std::vector<std::string> hosts;
    for (const int node : node_of_rank) hosts.push_back(std::to_string(node));
    expect_topology(nodes, node_of_rank, hosts);
    expect_topology(nodes.duplicate(), node_of_rank, hosts);

    // Ranks 1 and 3 in one part and 2 and 0 in the other.
    const bool odd = nodes.rank() % 2 == 1;
    const auto part = nodes.split(odd, odd ? 0 : -nodes.rank());
    const std::vector<std::size_t> ranks = odd ? std::vector<std::size_t>{1, 3} : std::vector<std::size_t>{2, 0};
    expect_topology(part, {0, node_of_rank[ranks[0]] == node_of_rank[ranks[1]] ? 0 : 1},
                    {hosts[ranks[0]], hosts[ranks[1]]});
    std::vector<double> sums(100'003, nodes.rank());
    part.all_reduce(std::span(sums));
    EXPECT_EQ(sums, std::vector<double>(100'003, odd ? 4.0 : 2.0));
  }
}

TEST(Nodes, RanksOfOneNodeShareMemory) {
  const auto nodes = on_nodes({0, 0, 1, 1});
  const auto memory = nodes.shared_memory(1000 * sizeof(double));
  EXPECT_FALSE(may_be_written_later(nodes, memory.data(), memory.size())) << "a region of its node";
  std::vector<double> own(1000);
  EXPECT_TRUE(may_be_written_later(nodes, own.data(), memory.size())) << "between nodes MPI may write there";
}

TEST(Nodes, AFailureIsHeardOnOtherNodesAndTheWorldIsInStepAgain) {
  const auto nodes = on_nodes({0, 0, 1, 1});
  Outcome mine;
  if (nodes.rank() == 3) {
    mine = {Outcome::Kind::failed, ExitCode::data, false, "bad luck"};
    raise_alarm(nodes, mine);
  } else {
    std::vector<double> values(100'003);
    EXPECT_THROW(nodes.all_reduce(std::span(values)), RemoteError);
    mine.kind = Outcome::Kind::interrupted;
  }
  const auto cause = root_cause(agree(nodes, mine, 30s), nodes.topology().hosts);
  ASSERT_TRUE(cause);
  EXPECT_STREQ(cause->what(), "rank 3 (1): bad luck");
  EXPECT_EQ(nodes.topology().num_nodes, 2);
  std::vector<double> values(100'003, 1.0);
  nodes.all_reduce(std::span(values));
  EXPECT_EQ(values, std::vector<double>(100'003, 4.0));
}

TEST(Watch, SaysWhoIsLateOnWhicheverNode) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 0, 0}, std::vector{0, 0, 1, 1}, std::vector{0, 1, 2, 3}}) {
    const auto ranks = on_nodes(nodes);
    const AnsweringThread answering(ranks);
    note_step(ranks, 41, 2);
    world().barrier();
    if (world().rank() != 3) try {
        const ScopedTimeout brief(ranks, 300ms);
        ranks.barrier();
        ADD_FAILURE() << "rank 3 has not come";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::retry);
        const std::string text = error.what();
        const auto says = [&](const std::string& what) { return text.find(what) != std::string::npos; };
        EXPECT_TRUE(says("waiting for barrier()") && says("0.3 s")) << text;
        EXPECT_TRUE(says("rank 3 (" + std::to_string(nodes[3]) + ") has not come: ")) << text;
        EXPECT_TRUE(says("it has made no call yet")) << text;  // after what the kernel has to say, on a busy machine
        EXPECT_TRUE(says("in step 41 of epoch 2")) << text;
        EXPECT_TRUE(says("Rank 3 stands in\n")) << text;
      }
    world().barrier();
  }
}

// As in a program without a Launch, or whose MPI has only one thread.
TEST(Watch, RanksThatWaitAnswerWhereNoThreadDoes) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 1, 1}, std::vector{0, 1, 1, 1}, std::vector{0, 1, 2, 3}})
    for (const int late : {1, 2}) {
      const auto ranks = on_nodes(nodes);
      world().barrier();
      std::int64_t right = world().rank() == late;
      if (world().rank() != late) try {
          const ScopedTimeout brief(ranks, 500ms);
          ranks.barrier();
          ADD_FAILURE() << "rank " << late << " has not come";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::retry);
          const std::string text = error.what();
          const auto names = [&](int rank) {
            return text.find("rank " + std::to_string(rank) + " (") != std::string::npos;
          };
          const bool is_alone = std::ranges::count(nodes, nodes[static_cast<std::size_t>(late)]) == 1;
          EXPECT_TRUE(names(late)) << text;
          right = names(late) && text.find(is_alone ? "nobody there answers" : "has not come: ") != std::string::npos;
          for (const int other : {0, 1, 2, 3})
            right = right && (other == late || other == world().rank() || !names(other));
        }
      // A rank that comes to its timeout much later than the others, on a busy machine, finds nobody to ask.
      EXPECT_GE(world().all_reduce(right), 3) << late;
    }
}

TEST(Watch, ARankWhoseNodeDoesNotAnswerIsNotWaitedForLonger) {
  const auto ranks = on_nodes({0, 0, 0, 1});
  // No rank has an AnsweringThread, so nobody answers for node 1.
  if (world().rank() != 3) {
    EXPECT_THROW(agree(ranks, {}, 300ms), RanksMissing);
  }
  world().barrier();
}

TEST(Watch, EveryRankThatHasNotComeToAnAgreementIsNamed) {
  // Outcomes pass through other ranks, which may be missing too.
  for (const std::vector<int>& missing : {std::vector{1}, std::vector{3}, std::vector{1, 2}, std::vector{0, 2, 3}}) {
    const auto ranks = on_nodes({0, 0, 1, 1});
    if (std::ranges::count(missing, world().rank()) == 0) try {
        agree(ranks, {}, 300ms);
        ADD_FAILURE() << "not all ranks have come";
      } catch (const RanksMissing& lost) {
        std::string names;
        for (const int rank : missing)
          names += (names.empty() ? "" : ", ") + std::to_string(rank) + (rank < 2 ? " (0)" : " (1)");
        EXPECT_NE(std::string(lost.what()).find(" from rank " + names + ": "), std::string::npos) << lost.what();
      }
    world().barrier();
  }
}

TEST(Watch, ARankThatComesToAnAgreementAtTheLimitIsHeardOrNamed) {
  // Ranks with this limit wait for 1.15 s: half of it, and a second for answers.
  for (const auto delay : {1140ms, 1149ms, 1150ms, 1151ms, 1160ms}) {
    const auto ranks = on_nodes({0, 0, 1, 1});
    if (world().rank() == 3) std::this_thread::sleep_for(delay);
    try {
      EXPECT_EQ(agree(ranks, {}, 300ms).size(), 4U);
    } catch (const RanksMissing& lost) {
      EXPECT_NE(std::string(lost.what()).find("no word within"), std::string::npos) << lost.what();
    }
    world().barrier();
  }
}

TEST(Watch, OneSpeaksWhereSeveralHaveWaitedTooLong) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 0, 0}, std::vector{0, 0, 1, 1}, std::vector{0, 1, 2, 3}}) {
    const auto ranks = on_nodes(nodes);
    std::int64_t speak = 0;
    if (world().rank() != 3) {
      Outcome mine;
      try {
        const ScopedTimeout brief(ranks, 200ms);
        ranks.barrier();
      } catch (const Error&) {
        mine = current_outcome();
        raise_alarm(ranks, mine);
      }
      try {
        agree(ranks, mine, 30s);
        ADD_FAILURE() << "rank 3 has not come";
      } catch (const RanksMissing& lost) {
        EXPECT_EQ(lost.code(), ExitCode::retry);
        speak = lost.report_delay() == 0ms;
      }
    }
    EXPECT_EQ(world().all_reduce(speak), 1);
  }
}

TEST(Watch, WaitsForAnnouncedWork) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 0, 0}, std::vector{0, 0, 1, 1}}) {
    const auto ranks = on_nodes(nodes);
    const AnsweringThread answering(ranks);
    const ScopedTimeout brief(ranks, 200ms);
    if (world().rank() == 3) keep_alive(ranks, 30s);
    world().barrier();
    if (world().rank() == 3) std::this_thread::sleep_for(1s);  // the work
    EXPECT_NO_THROW(ranks.barrier());
  }
}

TEST(Watch, SaysThatRanksWaitForEachOtherInDifferentCalls) {
  const auto ranks = on_nodes({0, 0, 0, 0});
  const auto one = ranks.duplicate(), other = ranks.duplicate();
  one.barrier();
  other.barrier();
  double values[3] = {};
  Outcome mine;
  try {
    if (world().rank() == 2)
      one.all_reduce(std::span(values));
    else
      other.barrier();
    ADD_FAILURE() << "not all ranks are there";
  } catch (...) {
    mine = current_outcome();
    raise_alarm(ranks, mine);
  }
  const auto cause = root_cause(agree(ranks, mine, 30s), ranks.topology().hosts);
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->code(), ExitCode::user_error);
  const std::string text = cause->what();
  EXPECT_NE(text.find("barrier() as its 2nd"), std::string::npos) << text;
  EXPECT_NE(text.find("all_reduce(float64 [3], sum) as its 2nd"), std::string::npos) << text;
}

TEST(Watch, SaysAtTheLimitThatRanksOfOtherNodesAreInDifferentCalls) {
  for (const std::vector<int>& nodes : {std::vector{0, 0, 1, 1}, std::vector{0, 1, 2, 3}}) {
    const auto ranks = on_nodes(nodes);
    const AnsweringThread answering(ranks);
    const auto one = ranks.duplicate();
    world().barrier();
    Outcome mine;
    try {
      const ScopedTimeout brief(ranks, 500ms);
      double values[3] = {};
      if (nodes[static_cast<std::size_t>(world().rank())] == 0)
        one.barrier();
      else
        one.all_reduce(std::span(values), ReduceOp::max);
      ADD_FAILURE() << "they differ";
    } catch (...) {
      mine = current_outcome();
      raise_alarm(ranks, mine);
    }
    const auto cause = root_cause(agree(ranks, mine, 30s), ranks.topology().hosts);
    ASSERT_TRUE(cause);
    EXPECT_EQ(cause->code(), ExitCode::user_error);
    const std::string text = cause->what();
    EXPECT_NE(text.find("barrier() as its 1st"), std::string::npos) << text;
    EXPECT_NE(text.find("all_reduce(float64 [3], max) as its 1st"), std::string::npos) << text;
  }
}

TEST(Watch, SaysThatARankHasReturned) {
  const auto ranks = on_nodes({0, 0, 0, 0});
  const auto channel = ranks.duplicate();
  Outcome mine;
  if (world().rank() != 1) try {
      channel.barrier();
      ADD_FAILURE() << "rank 1 has not come";
    } catch (const RemoteError&) {
      mine = current_outcome();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 (0) has returned from its work"), std::string::npos)
          << error.what();
      mine = current_outcome();
      raise_alarm(ranks, mine);
    }
  const auto cause = root_cause(agree(ranks, mine, 30s), ranks.topology().hosts);
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->code(), ExitCode::user_error);
}

TEST(StepTimes, RankZeroHasThoseOfAllNodes) {
  for (const auto& node_of_rank : placements) {
    const auto nodes = on_nodes(node_of_rank);
    StepTimes times(nodes);
    const auto size = static_cast<std::size_t>(nodes.size());
    for (std::int64_t step = 1; step <= 40; ++step) {
      const bool is_known = nodes.rank() == 0 && times.at(step);
      EXPECT_FALSE(is_known) << "no rank has begun it";
      nodes.barrier();
      times.note(step);
      nodes.barrier();
      if (nodes.rank() != 0 || step == 1) continue;
      // All ranks had begun the step before when they began this one. A message of another node may be on its way.
      std::optional<std::vector<watch::StepSample>> samples;
      while (!samples) samples = times.at(step - 1);
      ASSERT_EQ(samples->size(), size);
      for (const auto& sample : *samples) {
        EXPECT_GT(sample.clock_ns, 0);
        EXPECT_GT(sample.memory_bytes, 1 << 20);
      }
      EXPECT_LT(samples->front().wait_ns, samples->front().clock_ns);
    }
    nodes.barrier();
  }
}

TEST(StepTimes, AreSentInIntervals) {
  const auto nodes = on_nodes({0, 0, 1, 1});
  StepTimes times(nodes);
  if (nodes.rank() == 0) times.set_interval(8);
  // The interval and the samples are messages, which may take some steps to arrive.
  std::int64_t intervals = 0;  // in a row of which only the first step is known
  for (std::int64_t step = 1; nodes.all_reduce(intervals, ReduceOp::max) < 5; ++step) {
    ASSERT_LT(step, 100'000) << "other steps are sent too, or none";
    times.note(step);
    nodes.barrier();
    if (nodes.rank() != 0 || step % 8 != 7 || !times.at(step - 7)) continue;
    intervals = times.at(step - 4) ? 0 : intervals + 1;
  }
}

TEST(StepTimes, OfAnotherAttemptAreNotTaken) {
  const auto nodes = on_nodes({0, 1, 1, 1});
  StepTimes before(nodes);
  for (std::int64_t step = 1; step <= 5; ++step) before.note(step);
  nodes.barrier();
  EXPECT_FALSE(attempt_on_all(nodes, {.done = 60s, .failed = 60s}, [] {}));
  StepTimes after(nodes);
  const bool is_known = nodes.rank() == 0 && after.at(3);
  EXPECT_FALSE(is_known);
  nodes.barrier();
  after.note(3);
  nodes.barrier();
  after.note(4);
  while (nodes.rank() == 0 && !after.at(3)) {
  }
  nodes.barrier();
}

}  // namespace
}  // namespace muster::detail::comm::nodes_test
